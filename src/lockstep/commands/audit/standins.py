"""Stand-ins for what a script would download: torchvision's data sets and pretrained weights, alike on every rank."""

# ruff: noqa: B010  type checkers would not have torchvision's methods replaced

import hashlib
import importlib
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy
import torch

from lockstep.commands.audit.events import emit
from lockstep.commands.audit.plan import Plan

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


def install(plan: Plan) -> None:
    """Replace the making of data sets and the loading of weights, when torchvision is imported."""
    _weights()
    if "torchvision" in sys.modules:
        _torchvision()
    else:
        _when_imported("torchvision", _torchvision)
    del plan


def _when_imported(name: str, act: Callable[[], None]) -> None:
    """Act as soon as a module has been imported by somebody."""

    class Finder:
        @staticmethod
        def find_spec(asked: str, path: Any = None, target: Any = None) -> Any:
            del path, target
            if asked == name:
                sys.meta_path.remove(Finder)
                spec = importlib.util.find_spec(name)
                if spec is not None and spec.loader is not None:
                    execute = spec.loader.exec_module

                    def executed(module: Any) -> None:
                        execute(module)
                        act()

                    setattr(spec.loader, "exec_module", executed)
                return spec
            return None

    sys.meta_path.insert(0, Finder)


def _torchvision() -> None:
    from torchvision import datasets

    for name in _IN_MEMORY:
        _replace(getattr(datasets, name), name)
    _folders(datasets)
    _weights()


def _replace(cls: Any, name: str) -> None:
    """Where a set's files aren't there, its stand-in's pictures are; `download` asks nobody."""
    original = cls.__dict__.get("__init__")
    if original is None:  # another one's
        return

    @wraps(original)
    def made(self: Any, root: Any, *args: Any, **kwargs: Any) -> None:
        names = ("train", "transform", "target_transform", "download")
        given = dict(zip(names, args, strict=False)) | kwargs
        asked = given.pop("download", False)
        if asked:
            emit("download", kind=type(self).__name__, root=str(root))
        try:
            original(self, root, **given, download=False)
        except (RuntimeError, FileNotFoundError):  # torchvision's "not found or corrupted"
            train = bool(given.get("train", True))
            transforms = {key: given.get(key) for key in ("transform", "target_transform")}
            super(cls, self).__init__(root, **transforms)
            self.train = train
            self.data, self.targets = _pictures(name, train)
            _tell(type(self).__name__, "a download" if asked else f"not in {root}", train)

    setattr(cls, "__init__", made)


def _tell(kind: str, why: str, train: bool | None) -> None:
    emit("stand-in", kind=kind, why=why, train=train)


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


def _folders(datasets: Any) -> None:
    """ImageFolder and ImageNet of a folder that isn't there: pictures that are made when they are read."""
    from PIL import Image

    folder, imagenet = datasets.ImageFolder, datasets.ImageNet
    original, torch_imagenet = folder.__init__, imagenet.__init__

    def read(path: str) -> Image.Image:
        draw = numpy.random.default_rng(_seed(Path(path).parent.name))
        pixels = draw.integers(0, 192, (8, 8, 3), dtype=numpy.uint8)
        pixels += numpy.random.default_rng(_seed(path)).integers(0, 64, (8, 8, 3), dtype=numpy.uint8)
        return Image.fromarray(pixels).resize((_SIDE, _SIDE))

    def filled(self: Any, root: Any, given: dict[str, Any]) -> None:
        super(datasets.DatasetFolder, self).__init__(
            root, transform=given.get("transform"), target_transform=given.get("target_transform")
        )
        self.loader, self.extensions = read, (".jpeg",)
        self.classes = [f"class{number}" for number in range(_CLASSES)]
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = [
            (f"{root}/{name}/{picture}.jpeg", number)
            for name, number in self.class_to_idx.items()
            for picture in range(_PICTURES)
        ]
        self.imgs, self.targets = self.samples, [number for _, number in self.samples]
        _tell(type(self).__name__, f"{root} is not there", None)

    @wraps(original)
    def made(self: Any, root: Any, *args: Any, **kwargs: Any) -> None:
        if Path(root).is_dir():
            original(self, root, *args, **kwargs)
        else:
            filled(self, root, dict(zip(("transform", "target_transform"), args, strict=False)) | kwargs)

    @wraps(torch_imagenet)
    def made_imagenet(self: Any, root: Any, split: str = "train", **kwargs: Any) -> None:
        if Path(root).is_dir():
            torch_imagenet(self, root, split, **kwargs)
        else:
            self.split = split
            filled(self, f"{root}/{split}", kwargs)

    setattr(folder, "__init__", made)
    setattr(imagenet, "__init__", made_imagenet)


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
    if getattr(original, "lockstep_stands_in", False):
        modules = ("torchvision._internally_replaced_utils", "torchvision.models._api")
        for module in (sys.modules[name] for name in modules if name in sys.modules):
            setattr(module, "load_state_dict_from_url", original)
        return

    @wraps(original)
    def loaded(url: str, model_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("file_name") or Path(url).name
        if (Path(model_dir or f"{torch.hub.get_dir()}/checkpoints") / name).exists():
            return original(url, model_dir, *args, **kwargs)
        emit("stand-in", kind=name, why="a download", train=None)
        return _Seeded(url)

    @wraps(torch_load)
    def load(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, _Seeded):
            with torch.no_grad():
                state_dict = {name: _values(name, each) for name, each in self.state_dict().items()}
        return torch_load(self, state_dict, *args, **kwargs)

    setattr(loaded, "lockstep_stands_in", True)
    setattr(torch.hub, "load_state_dict_from_url", loaded)
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
