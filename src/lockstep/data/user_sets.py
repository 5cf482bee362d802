"""Users' own image sets: pairs of tensors, map-style Datasets, or ImageSets, out of a factory or a user's loop."""

import hashlib
import inspect
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.data.agreement import generators
from lockstep.data.image_sets import Array, ArraySet, Ids, ImageSet, check_labels, numbered
from lockstep.errors import UserError, reason, with_article
from lockstep.randomness import bits_np, stream

EXPECTED = (
    "Give (train, val), each of them a pair of tensors (images [n, C, H, W] uint8 or float, labels [n], or of "
    "several a picture 0 and 1 [n, classes]), a map-style Dataset of (image, label) pairs, or an ImageSet."
)


def described(value: Any) -> str:
    """What a value is, in a few words, for a message."""
    if isinstance(value, tuple | list):
        return f"{with_article(value)} of {len(value)} ({', '.join(type(item).__name__ for item in value[:4])})"
    return with_article(value)


@dataclass(frozen=True, eq=False)
class DatasetSet:
    """A user's map-style Dataset as an image set.

    Before each sample torch's, Python's and NumPy's generators are seeded by (seed, epoch, sample id), and put back
    after the batch: what the Dataset's own random transforms draw depends on no rank, worker or batch. It takes 18 us a
    sample. Out of reach are generators of its own, as a NumPy one that it holds.
    """

    name: str
    dataset: Any
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    seed: int = 0
    label_sets: Array | None = None  # bool [sets, classes] where an image has several labels

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, ids: Ids, epoch: int | None = None, draws: Ids | None = None) -> tuple[Tensor, Tensor]:
        """Images [b, C, H, W] of the Dataset's type, and labels int64 [b]; epoch None: the same draws each time.

        `draws`: what each sample's draws are keyed by, where that is not its id: it may come several times.
        Raises UserError for a label outside the classes or an image of another shape, naming the sample.
        """
        images, labels = [], []
        key = stream(self.seed, "dataset", "evaluation" if epoch is None else epoch)
        seeds = bits_np(key, ids if draws is None else draws).tolist()
        with generators(everyones=True) as seed:
            for sample, own_seed in zip(ids.tolist(), seeds, strict=True):
                seed(own_seed, True)
                try:
                    image, label = self.dataset[sample]
                except Exception as error:
                    error.add_note(f"It was raised by sample {sample} of {self.name}.")
                    raise
                image = _as_image(image, f"{self.name}: sample {sample}")
                if tuple(image.shape) != self.shape:
                    what = f"{self.name}: sample {sample} is {list(image.shape)}, sample 0 is {list(self.shape)}"
                    raise UserError(what, "A batch needs one shape: resize and crop in the Dataset.")
                where = f"{self.name}: sample {sample}"
                if self.label_sets is None:
                    number = _as_label(label, where)
                    check_labels(self.name, np.array([number]), len(self.classes), sample)
                else:
                    number = _as_set(label, self.label_sets, where)
                images.append(image)
                labels.append(number)
        if not images:  # a rank without a sample of a short batch
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
    remedy = "Images are PIL images or tensors [C, H, W], uint8 or floating-point."
    raise UserError(f"{where} is {described(image)}{shape}, not an image", remedy)


def _as_label(label: Any, where: str) -> int:
    """A class number out of an integer, or a tensor or array of one."""
    value = np.asarray(label.detach().cpu() if isinstance(label, Tensor) else label)
    if value.size != 1 or value.dtype.kind not in "iub":
        what = str(label) if value.size == 1 else f"{described(label)}, shape {list(value.shape)}"
        remedy = (
            "A label is a whole number from 0 to classes - 1; where a picture has several, `targets` state them all."
        )
        raise UserError(f"{where} has the label {what}, which is no class number", remedy)
    return int(value.item())


def _as_set(label: Any, table: Array, where: str) -> int:
    """The row of the table that a label of 0 and 1 for each class means."""
    rows = np.flatnonzero((table == np.asarray(label.cpu() if isinstance(label, Tensor) else label)).all(axis=1))
    if not len(rows):
        raise UserError(f"{where} has other labels than its Dataset states", "Keep `targets` as its samples have them.")
    return int(rows[0])


def _table(datasets: Sequence[Any]) -> Array | None:
    """bool [sets, classes] where both sets state labels of 0 and 1 [n, classes]."""
    stated = [labels for dataset in datasets if (labels := _stated(dataset)) is not None and _are_several(labels)]
    if len(stated) < len(datasets) or len({labels.shape[1] for labels in stated}) > 1:
        return None
    return numbered([np.flatnonzero(row).tolist() for labels in stated for row in labels], stated[0].shape[1])[1]


def adapted(name: str, value: Any, seed: int, table: Array | None = None) -> ImageSet:
    """An ImageSet as it is, a map-style Dataset as one. `seed`: of the Dataset's random draws.
    Raises UserError for anything else, and a Dataset that doesn't tell its classes or gives no image and label.
    """
    if hasattr(value, "read"):
        wanted = ("name", "classes", "shape", "mean", "std", "fingerprint", "__len__")
        if missing := set(wanted) - set(dir(value)):
            raise UserError(f"{name} is an ImageSet without {', '.join(sorted(missing))}", EXPECTED)
        found: ImageSet = value
        return found
    if isinstance(value, IterableDataset):
        what = f"{name} is an IterableDataset ({type(value).__name__}), whose samples come in an order of its own"
        raise UserError(what, "Samples are asked for by number: make it a map-style Dataset, with __getitem__.")
    if not (hasattr(value, "__getitem__") and hasattr(value, "__len__")) or isinstance(value, tuple | list | Tensor):
        raise UserError(f"{name} is {described(value)}", EXPECTED)
    if len(value) == 0:
        raise UserError(f"{name} is empty", EXPECTED)
    first = value[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UserError(f"{name}: sample 0 is {described(first)}, not (image, label)", EXPECTED)
    channels, height, width = shape = tuple(_as_image(first[0], f"{name}: sample 0").shape)
    classes = _classes(name, value)
    if table is not None and len(classes) != table.shape[1]:
        raise UserError(f"{name} names {len(classes)} classes and has labels of {table.shape[1]}", EXPECTED)
    mean, std = (tuple(getattr(value, key, (0.5,) * channels)) for key in ("mean", "std"))
    kind = type(value)
    identity = repr((kind.__module__, kind.__qualname__, len(value), classes, shape, _members(value)))
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return DatasetSet(name, value, classes, (channels, height, width), mean, std, digest, seed, table)


def _classes(name: str, dataset: Any) -> tuple[str, ...]:
    """From what the Dataset, or one that it wraps (as Subset does), says of its classes or its labels."""
    for inner in _layers(dataset):
        if len(getattr(inner, "classes", ())):
            return tuple(map(str, inner.classes))
    labels = _stated(dataset)
    if labels is None:
        remedy = "Give it an attribute `classes` (their names) or `targets` (a label for each sample)."
        raise UserError(f"{name}: {described(dataset)} does not say which classes there are", remedy)
    if _are_several(labels):
        return tuple(map(str, range(labels.shape[1])))
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        what = f"{name}: its labels are {labels.dtype} {list(labels.shape)}, not class numbers"
        remedy = "Give whole numbers from 0 to classes - 1; of one-hot vectors take argmax()."
        raise UserError(what, remedy)
    check_labels(name, labels, int(labels.max()) + 1)
    return tuple(map(str, range(int(labels.max()) + 1)))


def _layers(dataset: Any) -> Iterator[Any]:
    while dataset is not None:  # a Subset and the like has one inside
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def _members(dataset: Any) -> str:
    """A digest of what a Dataset says of its samples: `indices` and `targets`, its own and of those that it wraps."""
    digest = hashlib.sha256()
    for inner in _layers(dataset):
        for name in ("indices", "targets"):
            held = getattr(inner, name, None)
            if isinstance(held, Sequence | np.ndarray | Tensor):
                plain = held.tolist() if isinstance(held, np.ndarray | Tensor) else list(held)
                digest.update(f"{name} {plain}".encode())
    return digest.hexdigest()


def _are_several(labels: Array) -> bool:
    """True for 0 and 1 [n, classes], where some sample has not exactly one."""
    return labels.ndim == 2 and bool(np.isin(labels, (0, 1)).all() and (labels.sum(axis=1) != 1).any())


def _stated(dataset: Any) -> Array | None:
    """The labels that a Dataset, or one that it wraps, states for all of its samples."""
    for inner in _layers(dataset):
        tensors: Any = getattr(inner, "tensors", ())  # TensorDataset's
        for found in (getattr(inner, "targets", ()), getattr(inner, "labels", ()), *tensors[1:2]):
            if isinstance(found, Sized) and len(found):
                return np.asarray(found)
    return None


def made_by(path: str, factory: Any, data_dir: Path) -> Any:
    """What a user's factory returns, whatever it is.

    It is called with the data folder where it has a parameter `data_dir` or one that must be given, else with nothing.
    Raises UserError for what is no function, or needs other arguments.
    """
    if not callable(factory):
        raise UserError(f"{path} is {described(factory)}, not a function", f"Name a factory. {EXPECTED}")
    parameters = inspect.signature(factory).parameters
    required = [
        p for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if "data_dir" in parameters and len(required) <= 1:
        return factory(data_dir=data_dir)
    if len(required) > 1:
        needs = ", ".join(p.name for p in required)
        raise UserError(f"{path} needs arguments: {needs}", "A factory takes no argument, or the data folder (a Path).")
    return factory(data_dir) if required else factory()


def user_sets(path: str, made: Any, seed: int) -> tuple[ImageSet, ImageSet]:
    """A user's own (train, val) as image sets. `path`: what messages call them; `seed`: of a Dataset's random draws.

    Floating-point images are taken as they are; uint8 ones are normalised: a pair of tensors by the training
    set's own mean and standard deviation, a Dataset by its `mean` and `std` attributes (0.5 where it has none).
    Raises UserError for sets of another form, saying what is expected.
    """
    if not isinstance(made, Sequence) or isinstance(made, str) or len(made) != 2:
        raise UserError(f"{path} gives {described(made)}, not two sets", EXPECTED)
    if all(isinstance(each, tuple | list) and len(each) == 2 for each in made):
        try:
            arrays = [i.detach().cpu().numpy() if isinstance(i, Tensor) else i for each in made for i in each]
        except TypeError as error:  # bfloat16, sparse
            raise UserError(f"{path}: numpy takes no such tensor: {reason(error)}", EXPECTED) from error
        if all(isinstance(array, np.ndarray) for array in arrays):
            return _array_sets(path, arrays)
    table = _table(made)
    train, val = (
        adapted(f"{path}/{part}", each, seed, table) for part, each in zip(("train", "val"), made, strict=True)
    )
    if len(train.classes) != len(val.classes):
        raise UserError(f"{path}: train has {len(train.classes)} classes and val has {len(val.classes)}", EXPECTED)
    return train, val


def _array_sets(path: str, arrays: list[Array]) -> tuple[ArraySet, ArraySet]:
    """arrays: images and labels to train on, then those to validate on."""
    train, train_labels, val, val_labels = arrays
    for part, images, labels in (("train", train, train_labels), ("val", val, val_labels)):
        several = labels.ndim == 2 and bool(((labels == 0) | (labels == 1)).all())
        fits = images.ndim == 4 and labels.shape[:1] == images.shape[:1] and len(images)
        fits = fits and (several or (labels.ndim == 1 and labels.dtype.kind in "iub"))
        if not fits or not (images.dtype == np.uint8 or images.dtype.kind == "f"):
            what = f"images {images.dtype} {list(images.shape)} and labels {labels.dtype} {list(labels.shape)}"
            raise UserError(f"{path}: {part} has {what}", EXPECTED)
    if train.shape[1:] != val.shape[1:] or train.dtype != val.dtype:
        raise UserError(f"{path}: the images of train and val differ in shape or type", EXPECTED)
    if train_labels.shape[1:] != val_labels.shape[1:]:
        raise UserError(f"{path}: the labels of train and val differ in their number of classes", EXPECTED)
    both, table = np.concatenate([train_labels, val_labels]), None
    if both.ndim == 2:  # several labels an image: from here on the number of its set of classes
        classes = both.shape[1]
        both, table = numbered([np.flatnonzero(row).tolist() for row in both], classes)
    else:
        classes = int(both.max()) + 1
    mean, std = _statistics(train)
    names, sets = tuple(map(str, range(classes))), []
    for part, images, given in (("train", train, train_labels), ("val", val, val_labels)):
        labels, both = np.split(both, [len(given)])
        check_labels(f"{path}/{part}", labels, classes if table is None else len(table))
        digest = hashlib.sha256(repr((images.shape, str(images.dtype))).encode())
        for array in (images, given):
            digest.update(np.ascontiguousarray(array).data)
        labels = labels.astype(np.int64)
        one = ArraySet(f"{path}/{part}", names, mean, std, (images,), labels, digest.hexdigest(), label_sets=table)
        sets.append(one)
    return sets[0], sets[1]


def _statistics(images: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 images / 255, from counts of values; 0 and 1 for floats."""
    channels = images.shape[1]
    if images.dtype != np.uint8:
        return (0.0,) * channels, (1.0,) * channels
    values = np.arange(256) / 255
    counts = np.stack([np.bincount(images[:, c].ravel(), minlength=256) for c in range(channels)]) / images[:, 0].size
    mean = (counts * values).sum(axis=1)
    std = np.sqrt((counts * (values - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())
