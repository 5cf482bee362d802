"""Users' own image sets: what a factory `package.module:factory` may return, and how it becomes an ImageSet."""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.data.agreement import members
from lockstep.data.arrays import ArraySet, Ids, ImageSet, check_labels
from lockstep.data.label_sets import numbered
from lockstep.errors import UserError

# What a factory may return for each of the two sets
_EXPECTED = (
    "Return (train, val), each of them a pair of tensors (images [n, C, H, W] uint8 or float, labels [n], or of "
    "several a picture 0 and 1 [n, classes]), a map-style Dataset of (image, label) pairs, or an ImageSet."
)


def user_sets(path: str, factory: Callable[..., Any], data_dir: Path) -> tuple[ImageSet, ImageSet]:
    """What a user's factory returns, as image sets.

    The factory is called with the data folder where it has a parameter `data_dir` or one that must be given, else with
    nothing. Floating-point images are taken as they are; uint8 ones are normalised: a pair of tensors by the training
    set's own mean and standard deviation, a Dataset by its `mean` and `std` attributes (0.5 where it has none).

    Raises:
        UserError: for a factory or a result of another form, saying what is expected.
    """
    made = _call(path, factory, data_dir)
    if not isinstance(made, Sequence) or len(made) != 2:
        raise UserError(f"{path} returned {_described(made)}, not two sets", _EXPECTED)
    pairs = [_as_arrays(each) for each in made]
    if pairs[0] is not None and pairs[1] is not None:
        return _array_sets(path, pairs[0], pairs[1])
    train, val = (_adapted(f"{path}/{part}", each) for part, each in zip(("train", "val"), made, strict=True))
    if len(train.classes) != len(val.classes):
        raise UserError(f"{path}: train has {len(train.classes)} classes and val has {len(val.classes)}", _EXPECTED)
    return train, val


def _call(path: str, factory: Any, data_dir: Path) -> Any:
    if not callable(factory):
        raise UserError(f"{path} is {_described(factory)}, not a function", f"Name a factory. {_EXPECTED}")
    parameters = inspect.signature(factory).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if any(p.name == "data_dir" and p.kind is not p.POSITIONAL_ONLY for p in parameters) and len(required) <= 1:
        return factory(data_dir=data_dir)
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        needs = ", ".join(p.name for p in required)
        raise UserError(f"{path} needs arguments: {needs}", "A factory takes no argument, or the data folder (a Path).")
    return factory(data_dir) if required else factory()


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value[:4])})"
    return f"a {type(value).__name__}"


def _as_arrays(value: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Images and labels as numpy arrays where `value` is a pair of tensors or arrays."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    if not all(isinstance(item, Tensor | np.ndarray) for item in value):
        return None
    images, labels = (i.detach().cpu().numpy() if isinstance(i, Tensor) else i for i in value)
    return images, labels


def _array_sets(path: str, train: Any, val: Any) -> tuple[ArraySet, ArraySet]:
    for part, (images, labels) in (("train", train), ("val", val)):
        fits = images.ndim == 4 and labels.shape[:1] == images.shape[:1] and len(images) and labels.dtype.kind in "iub"
        fits = fits and (labels.ndim == 1 or (labels.ndim == 2 and bool(((labels == 0) | (labels == 1)).all())))
        if not fits or not (images.dtype == np.uint8 or images.dtype.kind == "f"):
            raise UserError(
                f"{path}: {part} has images {images.dtype} {list(images.shape)} and labels {labels.dtype} "
                f"{list(labels.shape)}",
                _EXPECTED,
            )
    if train[0].shape[1:] != val[0].shape[1:] or train[0].dtype != val[0].dtype:
        raise UserError(f"{path}: the images of train and val differ in shape or type", _EXPECTED)
    if train[1].shape[1:] != val[1].shape[1:]:
        raise UserError(f"{path}: the labels of train and val differ in their number of classes", _EXPECTED)
    both, table = np.concatenate([train[1], val[1]]), None
    if both.ndim == 2:  # several labels an image: from here on the number of its set of classes
        classes = both.shape[1]
        both, table = numbered([np.flatnonzero(row).tolist() for row in both], classes)
    else:
        classes = int(both.max()) + 1
    mean, std = _statistics(train[0])
    names, numbers, sets = tuple(map(str, range(classes))), np.split(both, [len(train[1])]), []
    for part, (images, given), labels in zip(("train", "val"), (train, val), numbers, strict=True):
        name = f"{path}/{part}"
        check_labels(name, labels, classes if table is None else len(table))
        digest = hashlib.sha256(repr((images.shape, str(images.dtype))).encode())
        for array in (images, given):
            digest.update(np.ascontiguousarray(array).data)
        labels = labels.astype(np.int64)
        sets.append(ArraySet(name, names, mean, std, (images,), labels, digest.hexdigest(), label_sets=table))
    return sets[0], sets[1]


def _statistics(images: np.ndarray[Any, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 images / 255, from counts of values; 0 and 1 for floats."""
    channels = images.shape[1]
    if images.dtype != np.uint8:
        return (0.0,) * channels, (1.0,) * channels
    values = np.arange(256) / 255
    counts = np.stack([np.bincount(images[:, c].ravel(), minlength=256) for c in range(channels)]) / images[:, 0].size
    mean = (counts * values).sum(axis=1)
    std = np.sqrt((counts * (values - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


@dataclass(frozen=True, eq=False)
class DatasetSet:
    """A user's map-style Dataset as an image set. Random transforms inside it are its own: they are not keyed."""

    name: str
    dataset: Any
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, ids: Ids, epoch: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Images [b, C, H, W] of the Dataset's type, and labels int64 [b].

        Raises:
            UserError: for a label outside the classes or an image of another shape, naming the sample.
        """
        images, labels = [], []
        for sample in ids.tolist():
            image, label = self.dataset[sample]
            image = _as_image(image, f"{self.name}: sample {sample}")
            if tuple(image.shape) != self.shape:
                raise UserError(
                    f"{self.name}: sample {sample} is {list(image.shape)}, sample 0 is {list(self.shape)}",
                    "A batch needs one shape: resize and crop in the Dataset.",
                )
            number = _as_label(label, f"{self.name}: sample {sample}")
            check_labels(self.name, np.array([number]), len(self.classes), sample)
            images.append(image)
            labels.append(number)
        if not images:  # a rank without a share of a short batch
            first = _as_image(self.dataset[0][0], f"{self.name}: sample 0")
            return first.new_empty(0, *self.shape), torch.empty(0, dtype=torch.int64)
        return torch.stack(images), torch.tensor(labels)


def _as_image(image: Any, where: str) -> Tensor:
    """A PIL image or a tensor as [C, H, W], uint8 or floating-point."""
    if hasattr(image, "convert") and hasattr(image, "getbands"):  # PIL's, without importing it
        pixels = np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())
    if isinstance(image, Tensor) and image.ndim == 3 and (image.dtype == torch.uint8 or image.is_floating_point()):
        return image
    shape = f" {list(image.shape)} {image.dtype}" if isinstance(image, Tensor) else ""
    raise UserError(
        f"{where} is {_described(image)}{shape}, not an image",
        "Images are PIL images or tensors [C, H, W], uint8 or floating-point.",
    )


def _as_label(label: Any, where: str) -> int:
    """A class number out of an integer, or a tensor or array of one."""
    value = np.asarray(label.detach().cpu() if isinstance(label, Tensor) else label)
    if value.size != 1 or value.dtype.kind not in "iub":
        said = str(label) if value.size == 1 else f"{_described(label)}, shape {list(value.shape)}"
        raise UserError(
            f"{where} has the label {said}, which is no class number",
            "A label is a whole number from 0 to classes - 1; of a one-hot vector take its argmax().",
        )
    return int(value.item())


def _adapted(name: str, value: Any) -> ImageSet:
    if hasattr(value, "read"):
        wanted = ("name", "classes", "shape", "mean", "std", "fingerprint", "__len__")
        if missing := set(wanted) - set(dir(value)):
            raise UserError(f"{name} is an ImageSet without {', '.join(sorted(missing))}", _EXPECTED)
        made: ImageSet = value
        return made
    if isinstance(value, IterableDataset):
        raise UserError(
            f"{name} is an IterableDataset ({type(value).__name__}), whose samples come in an order of its own",
            "Samples are asked for by number here: make it a map-style Dataset with __getitem__ and __len__.",
        )
    if not (hasattr(value, "__getitem__") and hasattr(value, "__len__")) or isinstance(value, tuple | list | Tensor):
        raise UserError(f"{name} is {_described(value)}", _EXPECTED)
    if len(value) == 0:
        raise UserError(f"{name} is empty", _EXPECTED)
    first = value[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UserError(f"{name}: sample 0 is {_described(first)}, not (image, label)", _EXPECTED)
    channels, height, width = _as_image(first[0], f"{name}: sample 0").shape
    classes = _classes(name, value)
    mean, std = (tuple(getattr(value, key, (0.5,) * channels)) for key in ("mean", "std"))
    kind = type(value)
    shape = (channels, height, width)
    identity = repr((kind.__module__, kind.__qualname__, len(value), classes, shape, members(value)))
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return DatasetSet(name, value, classes, (channels, height, width), mean, std, digest)


def _classes(name: str, dataset: Any) -> tuple[str, ...]:
    """From the attribute `classes` or `targets` of the Dataset or of one that it wraps (as Subset does)."""
    inner = dataset
    while inner is not None:
        if len(getattr(inner, "classes", ())):
            return tuple(map(str, inner.classes))
        if len(getattr(inner, "targets", ())):
            labels = np.asarray(inner.targets)
            if labels.ndim != 1 or labels.dtype.kind not in "iu":
                raise UserError(
                    f"{name}: `targets` are {labels.dtype} {list(labels.shape)}, not class numbers",
                    "Whole numbers from 0 to classes - 1, one for each sample; of one-hot vectors take argmax().",
                )
            check_labels(name, labels, int(labels.max()) + 1)
            return tuple(map(str, range(int(labels.max()) + 1)))
        inner = getattr(inner, "dataset", None)
    raise UserError(
        f"{name}: {_described(dataset)} does not say which classes there are",
        "Give it an attribute `classes` (their names) or `targets` (a label for each sample).",
    )
