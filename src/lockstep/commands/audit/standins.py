"""Stand-ins for what a script would download: torchvision's data sets and pretrained weights, alike on every rank."""

# ruff: noqa: B010  type checkers would not have torchvision's methods replaced

import hashlib
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

from lockstep.commands.audit.events import emit

_CLASSES = 10
_PICTURES = 128  # of each class of a stand-in for a folder
_SIDE = 256  # of a stand-in for a picture in a folder, pixels
_IN_MEMORY = {  # name: shape of a picture, classes, samples of training and test set
    "MNIST": ((28, 28), 10, 60_000, 10_000),
    "FashionMNIST": ((28, 28), 10, 60_000, 10_000),
    "KMNIST": ((28, 28), 10, 60_000, 10_000),
    "CIFAR10": ((32, 32, 3), 10, 50_000, 10_000),
    "CIFAR100": ((32, 32, 3), 100, 50_000, 10_000),
}


_tell: list[Callable[..., None]] = [emit]


def install(tell: Callable[..., None] = emit) -> None:
    """Have data sets and weights that aren't there replaced, in this process: events `stand-in` go to `tell`."""
    _tell[0] = tell
    for_each_dataset(_replace)
    _weights()


def for_each_dataset(act: Callable[[type], None]) -> None:
    """Call a function with each class of data sets that there is, and with each that will be defined."""
    known: Any = Dataset.__init_subclass__

    def defined(cls: type, /, **kwargs: Any) -> None:
        known.__func__(cls, **kwargs)
        act(cls)

    setattr(Dataset, "__init_subclass__", classmethod(defined))
    queue: list[type] = [*Dataset.__subclasses__()]
    while queue:
        act(queue[-1])
        queue += queue.pop().__subclasses__()


def _replace(cls: type) -> None:
    if cls.__module__.startswith("torchvision.datasets.") and "__init__" in cls.__dict__:
        if cls.__name__ in _IN_MEMORY:
            _in_memory(cls)
        elif cls.__name__ in ("ImageFolder", "ImageNet"):
            _folder(cls)


def _in_memory(cls: Any) -> None:
    """Where a set's files aren't there, its stand-in's pictures are; `download` asks nobody."""
    original = cls.__init__

    @wraps(original)
    def init(self: Any, root: Any, *args: Any, **kwargs: Any) -> None:
        names = ("train", "transform", "target_transform", "download")
        options = dict(zip(names, args, strict=False)) | kwargs
        asked = options.pop("download", False)
        if asked:
            _tell[0]("download", kind=type(self).__name__, root=str(root))
        try:
            original(self, root, **options, download=False)
        except (RuntimeError, FileNotFoundError):  # torchvision's "not found or corrupted"
            train = bool(options.get("train", True))
            transforms = {key: options.get(key) for key in ("transform", "target_transform")}
            super(cls, self).__init__(root, **transforms)
            self.train = train
            self.data, self.targets = _pictures(type(self).__name__, train)
            why = "a download" if asked else f"not in {root}"
            _tell[0]("stand-in", kind=type(self).__name__, why=why, train=train)

    setattr(cls, "__init__", init)


def _pictures(name: str, train: bool) -> tuple[Any, Any]:
    """uint8 pictures of a set's shape and number, of which those of a class resemble each other, and their labels."""
    shape, classes, *counts = _IN_MEMORY[name]
    count = counts[0] if train else counts[1]
    draw = numpy.random.default_rng(_seed(name, str(train)))
    labels = draw.permutation(count) % classes
    classes_look = numpy.random.default_rng(_seed(name)).integers(0, 192, (classes, *shape), dtype=numpy.uint8)
    data = classes_look[labels]
    data += draw.integers(0, 64, (count, 1, *shape[1:]), dtype=numpy.uint8)
    if name.startswith("CIFAR"):
        return data, labels.tolist()
    return torch.from_numpy(data), torch.from_numpy(labels)


def _seed(*words: str) -> int:
    return int.from_bytes(hashlib.sha256(" ".join(words).encode()).digest()[:8])


def _folder(cls: Any) -> None:
    """ImageFolder and ImageNet of a folder that isn't there: pictures that are drawn when they are read."""
    original = cls.__init__

    @wraps(original)
    def init(self: Any, root: Any, *args: Any, **kwargs: Any) -> None:
        if Path(root).is_dir():
            original(self, root, *args, **kwargs)
            return
        names = ("split",) if cls.__name__ == "ImageNet" else ("transform", "target_transform")
        options = dict(zip(names, args, strict=False)) | kwargs
        if cls.__name__ == "ImageNet":
            self.split = options.get("split", "train")
            root = f"{root}/{self.split}"
        transforms = {key: options.get(key) for key in ("transform", "target_transform")}
        sys.modules["torchvision.datasets.vision"].VisionDataset.__init__(self, root, **transforms)
        self.loader, self.extensions = _drawn_picture, (".jpeg",)
        self.classes = [f"class{number}" for number in range(_CLASSES)]
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = [
            (f"{root}/{name}/{picture}.jpeg", number)
            for name, number in self.class_to_idx.items()
            for picture in range(_PICTURES)
        ]
        self.imgs, self.targets = self.samples, [number for _, number in self.samples]
        _tell[0]("stand-in", kind=type(self).__name__, why=f"{root} is not there", train=None)

    setattr(cls, "__init__", init)


def _drawn_picture(path: str) -> Any:
    from PIL import Image

    draw = numpy.random.default_rng(_seed(Path(path).parent.name))
    pixels = draw.integers(0, 192, (8, 8, 3), dtype=numpy.uint8)
    pixels += numpy.random.default_rng(_seed(path)).integers(0, 64, (8, 8, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels).resize((_SIDE, _SIDE))


class _Seeded(dict[str, Any]):
    """Weights that would have been downloaded: a module that loads them gets seeded ones."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key}: {self.url} was not downloaded under lockstep audit")


def _weights() -> None:
    """torch.hub.load_state_dict_from_url where the file isn't in its cache."""
    original, torch_load = torch.hub.load_state_dict_from_url, torch.nn.Module.load_state_dict

    @wraps(original)
    def loaded(url: str, model_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("file_name") or Path(url).name
        if (Path(model_dir or f"{torch.hub.get_dir()}/checkpoints") / name).exists():
            return original(url, model_dir, *args, **kwargs)
        _tell[0]("stand-in", kind=name, why="a download", train=None)
        return _Seeded(url)

    @wraps(torch_load)
    def load(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, _Seeded):
            with torch.no_grad():
                state_dict = {name: _values(name, each) for name, each in self.state_dict().items()}
        return torch_load(self, state_dict, *args, **kwargs)

    names = ("torch.hub", "torchvision._internally_replaced_utils", "torchvision.models._api")
    for module in (sys.modules[name] for name in names if name in sys.modules):
        setattr(module, "load_state_dict_from_url", loaded)
    setattr(torch.nn.Module, "load_state_dict", load)


def _values(name: str, like: torch.Tensor) -> torch.Tensor:
    """A weight by its name: the same on every rank. Matrices and filters are scaled by 1 / sqrt(inputs)."""
    if not like.is_floating_point():
        return like.clone()
    if like.dim() < 2:
        ones = name.endswith(("running_var", "weight"))
        return torch.full_like(like, 1.0 if ones else 0.0)
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(_seed(name) % 2**63))
    return drawn.div_(like[0].numel() ** 0.5).to(like)
