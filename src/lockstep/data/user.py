"""Users' own image sets: what a factory `package.module:factory` or a loop of one's own may give, as image sets."""

import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.data.arrays import ArraySet, ImageSet, check_labels
from lockstep.data.label_sets import numbered
from lockstep.data.map_style import EXPECTED, adapted, described
from lockstep.errors import UserError


def made_by(path: str, factory: Any, data_dir: Path) -> Any:
    """What a user's factory returns, whatever it is.

    It is called with the data folder where it has a parameter `data_dir` or one that must be given, else with nothing.

    Raises:
        UserError: for what is no function, or needs other arguments.
    """
    if not callable(factory):
        raise UserError(f"{path} is {described(factory)}, not a function", f"Name a factory. {EXPECTED}")
    parameters = inspect.signature(factory).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if any(p.name == "data_dir" and p.kind is not p.POSITIONAL_ONLY for p in parameters) and len(required) <= 1:
        return factory(data_dir=data_dir)
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        needs = ", ".join(p.name for p in required)
        raise UserError(f"{path} needs arguments: {needs}", "A factory takes no argument, or the data folder (a Path).")
    return factory(data_dir) if required else factory()


def user_sets(path: str, made: Any, seed: int) -> tuple[ImageSet, ImageSet]:
    """A user's own (train, val) as image sets. `path`: what messages call them; `seed`: of a Dataset's random draws.

    Floating-point images are taken as they are; uint8 ones are normalised: a pair of tensors by the training
    set's own mean and standard deviation, a Dataset by its `mean` and `std` attributes (0.5 where it has none).

    Raises:
        UserError: for sets of another form, saying what is expected.
    """
    if not isinstance(made, Sequence) or isinstance(made, str) or len(made) != 2:
        raise UserError(f"{path} gives {described(made)}, not two sets", EXPECTED)
    pairs = [_as_arrays(each) for each in made]
    if pairs[0] is not None and pairs[1] is not None:
        return _array_sets(path, pairs[0], pairs[1])
    train, val = (adapted(f"{path}/{part}", each, seed) for part, each in zip(("train", "val"), made, strict=True))
    if len(train.classes) != len(val.classes):
        raise UserError(f"{path}: train has {len(train.classes)} classes and val has {len(val.classes)}", EXPECTED)
    return train, val


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
                EXPECTED,
            )
    if train[0].shape[1:] != val[0].shape[1:] or train[0].dtype != val[0].dtype:
        raise UserError(f"{path}: the images of train and val differ in shape or type", EXPECTED)
    if train[1].shape[1:] != val[1].shape[1:]:
        raise UserError(f"{path}: the labels of train and val differ in their number of classes", EXPECTED)
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
