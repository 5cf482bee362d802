"""What an image set must offer, and sets of one shape in arrays.

An image set is what training and evaluation read from: `len`, `classes`, `read(ids, epoch)`, and a few facts. Arrays
out of official files are memory-mapped: the ranks of a host share one copy of them, in the page cache.

Where a picture has several labels, its label is the number of a set of classes, and a table says which those are. So
everything between a file and the loss carries one whole number a picture.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]
Ids = np.ndarray[Any, np.dtype[np.int64]]


class ImageSet(Protocol):
    """Labelled images, each known by its sample id 0 .. len - 1. Must survive pickling, for loader workers."""

    @property
    def name(self) -> str:
        """For messages and records."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes' names; label k is classes[k]."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images as they are read."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, of pixels in [0, 1]."""

    @property
    def std(self) -> tuple[float, ...]:
        """Per channel, of pixels in [0, 1]."""

    @property
    def fingerprint(self) -> str:
        """Digest of what the set holds: another set, another fingerprint."""

    def __len__(self) -> int: ...

    def read(self, ids: Ids, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Images [b, C, H, W], uint8 or floating-point (taken as normalised), and labels int64 [b].

        epoch None: evaluation, nothing random. A `read` that draws may take `draws` as well, int64 [b], which its draws
        are keyed by instead of `ids` (--balance, --aug-repeats: a sample may come several times in an epoch).
        """


@dataclass(frozen=True, eq=False)
class ArraySet:
    """Images of one shape; sample ids run through the arrays in order.

    Where `reopen` says how it is made from files, pickling keeps that alone: a worker process opens its own maps, of
    the same pages. Other arrays are copied.
    """

    name: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of pixels / 255
    std: tuple[float, ...]
    images: tuple[Array, ...]  # each uint8 (or floating-point, then taken as normalised) [n, C, H, W]
    labels: Ids  # int64 [n over all arrays]
    fingerprint: str
    label_sets: Array | None = None  # bool [sets, classes] where an image has several: see `label_sets`
    reopen: tuple[Callable[..., "ArraySet"], tuple[Any, ...]] | None = None  # a function, and its arguments

    def __reduce__(self) -> Any:
        return self.reopen or super().__reduce__()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        channels, height, width = self.images[0].shape[1:]
        return channels, height, width

    @property
    def nbytes(self) -> int:
        """Bytes that `load_all` takes."""
        return sum(array.nbytes for array in self.images) + self.labels.nbytes

    @cached_property
    def _starts(self) -> Ids:
        return np.cumsum([0] + [len(array) for array in self.images], dtype=np.int64)

    def read(self, ids: Ids, epoch: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Images uint8 [b, C, H, W] and labels int64 [b] of these ids, in their order; nothing else is read.
        Raises IndexError for an id outside 0 .. len - 1.
        """
        if len(ids) and int(ids.view(np.uint64).max()) >= len(self):  # a negative id is huge as an unsigned one
            raise IndexError(f"{self.name} has samples 0 to {len(self) - 1}; asked for {ids.min()} to {ids.max()}")
        labels = torch.from_numpy(self.labels[ids])
        if len(self.images) == 1:
            return torch.from_numpy(self.images[0][ids]), labels
        out = np.empty((len(ids), *self.shape), self.images[0].dtype)
        array_of = np.searchsorted(self._starts, ids, side="right") - 1
        for number, array in enumerate(self.images):
            here = np.flatnonzero(array_of == number)
            out[here] = array[ids[here] - self._starts[number]]
        return torch.from_numpy(out), labels

    def load_all(self) -> tuple[Tensor, Tensor]:
        """All images, [n, C, H, W] contiguous, and labels, int64 [n]: copies, for a loader that keeps them."""
        return torch.from_numpy(np.concatenate(self.images)), torch.from_numpy(self.labels.copy())


def check_labels(where: str, labels: Array, classes: int, first_id: int = 0) -> None:
    """Raise UserError for the first label outside 0 .. classes - 1; its sample id is its place plus `first_id`."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        place = int(bad[0])
        what = f"{where}: sample {first_id + place} has label {labels[place]}, and there are {classes} classes"
        raise UserError(what, f"Labels run from 0 to {classes - 1}; {len(bad)} of them don't.")


def label_sets(images: ImageSet) -> Array | None:
    """bool [sets, classes]: row k has the classes that label k means; None where label k means classes[k] alone."""
    found: Array | None = getattr(images, "label_sets", None)
    return found


def numbered(sets: Sequence[Collection[int]], classes: int) -> tuple[Ids, Array]:
    """The number of each picture's set, int64 [n], and the table; numbers go by the sets' classes, in order."""
    keys = [tuple(sorted(set(each))) for each in sets]
    distinct = sorted(set(keys))
    table = np.zeros((len(distinct), classes), np.bool_)
    for row, members in enumerate(distinct):
        table[row, list(members)] = True
    number = {key: row for row, key in enumerate(distinct)}
    return np.array([number[key] for key in keys], np.int64), table


def counts(images: ImageSet, labels: Ids) -> Ids:
    """Pictures of each class among these labels, int64 [classes]."""
    sets = label_sets(images)
    if sets is None:
        return np.bincount(labels, minlength=len(images.classes))
    return np.bincount(labels, minlength=len(sets)) @ sets.astype(np.int64)


def label_name(images: ImageSet, label: int) -> str:
    """What a label is called: the class's name, or those of its set."""
    sets = label_sets(images)
    if sets is None:
        return images.classes[label]
    return " + ".join(images.classes[k] for k in np.flatnonzero(sets[label])) or "none"


def file_of(images: ImageSet, sample: int) -> str:
    """What a set calls a sample: a path below its folder, as ImageFolder's `samples` have it too; "" without one."""
    listed = getattr(getattr(images, "dataset", None), "samples", None)
    listed = listed if isinstance(listed, list) and isinstance(listed[sample], tuple) else None
    key = getattr(getattr(images, "source", images), "key", None)
    name = str(listed[sample][0] if listed else key(sample) if key else "")
    return "" if name.isdecimal() else name


def table_on(images: ImageSet, device: Any) -> Tensor | None:
    """`label_sets` as bool [sets, classes] on a device."""
    sets = label_sets(images)
    return None if sets is None else torch.from_numpy(sets).to(device)


def members(labels: Tensor, classes: int, sets: Tensor | None) -> Tensor:
    """bool [b, classes]: the classes of each of these labels, int64 [b]; `sets` as `table_on` gives it. Raises
    RuntimeError, on a GPU later, for a label beyond the classes."""
    if sets is not None:
        return sets[labels]
    return torch.zeros(len(labels), classes, dtype=torch.bool, device=labels.device).scatter_(1, labels[:, None], True)
