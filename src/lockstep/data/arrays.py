"""What an image set must offer, and sets of one shape in arrays.

Official files are memory-mapped: the ranks of a host share one copy of them, in the page cache.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
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


@dataclass(frozen=True)
class Column:
    """Equal records in one file: record i starts at byte `offset + i * stride`."""

    path: Path
    offset: int
    stride: int


@dataclass(frozen=True)
class Part:
    """A run of samples: pixels as uint8 [C, H, W] in C order, and labels of one byte, in one file or in two."""

    count: int
    images: Column
    labels: Column


@dataclass(frozen=True, eq=False)
class ArraySet:
    """Images of one shape; sample ids run through the arrays in order.

    Where `parts` names the files behind the arrays, pickling keeps the names alone: a worker process opens its own
    maps, of the same pages. Other arrays are copied.
    """

    name: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of pixels / 255
    std: tuple[float, ...]
    images: tuple[Array, ...]  # each uint8 (or floating-point, then taken as normalised) [n, C, H, W]
    labels: Ids  # int64 [n over all arrays]
    fingerprint: str
    parts: tuple[Part, ...] = ()
    label_sets: Array | None = None  # bool [sets, classes] where an image has several: see label_sets.py

    def __reduce__(self) -> Any:
        if not self.parts:
            return super().__reduce__()
        return map_files, (self.name, self.classes, self.shape, self.mean, self.std, self.parts, self.fingerprint)

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

        Raises:
            IndexError: for an id outside 0 .. len - 1.
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


def map_files(
    name: str,
    classes: tuple[str, ...],
    shape: tuple[int, int, int],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    parts: tuple[Part, ...],
    fingerprint: str,
) -> ArraySet:
    """The set whose samples are the records of these files, one part after the other.

    Raises:
        UserError: for a label outside the classes, naming the file and the sample.
    """
    labels = [np.array(_mapped(part.labels, part.count, ())) for part in parts]  # small: read at once
    first_id = 0
    for part, values in zip(parts, labels, strict=True):
        check_labels(str(part.labels.path), values, len(classes), first_id)
        first_id += part.count
    images = tuple(_mapped(part.images, part.count, shape) for part in parts)
    return ArraySet(name, classes, mean, std, images, np.concatenate(labels).astype(np.int64), fingerprint, parts)


def _mapped(column: Column, count: int, shape: tuple[int, ...]) -> Array:
    """A read-only view [count, *shape] of a column's records, without a copy."""
    pages = np.memmap(column.path, np.uint8, "r")
    inner = np.empty(shape, np.uint8).strides
    return np.ndarray((count, *shape), np.uint8, buffer=pages, offset=column.offset, strides=(column.stride, *inner))


def check_labels(where: str, labels: Array, classes: int, first_id: int = 0) -> None:
    """Raise UserError for the first label outside 0 .. classes - 1; its sample id is its place plus `first_id`."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        place = int(bad[0])
        raise UserError(
            f"{where}: sample {first_id + place} has label {labels[place]}, and there are {classes} classes"
            + (f" ({len(bad)} such labels in all)" if len(bad) > 1 else ""),
            f"Labels run from 0 to {classes - 1}: put the data right, or download it again.",
        )
