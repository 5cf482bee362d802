"""Pictures that another library's data set holds, through the same decoding as those of a folder."""

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.arrays import Array, Ids
from lockstep.data.folder import FolderSet
from lockstep.errors import UserError, reason

_ANOTHER = "Take a set with a class for each picture."


@dataclass(frozen=True, eq=False)
class ListedSet(FolderSet):
    """Picture files that a data set lists, under its name."""

    called: str = ""

    @property
    def name(self) -> str:
        """The data set's."""
        return self.called


@dataclass(frozen=True, eq=False)
class HeldSet(ListedSet):
    """Rows of a data set's object, which need no files of their own; a sample's key is the number of its row."""

    source: Any = None
    fetch: Callable[[Any, int], bytes] | None = None  # a picture as it is stored, of a row of the source
    sizes: Ids | None = None  # int64 by row, in bytes, where they are known without reading
    file: str = ""  # the newest of those that hold the rows
    digest: str = ""  # of what the source holds, where they are not

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over classes, rows, sizes, labels, and the digest of what the source holds."""
        return hashlib.sha256(f"{super().fingerprint} {self.digest}".encode()).hexdigest()

    @property
    def sized(self) -> bool:
        """True where the pictures' sizes are known without reading them."""
        return self.sizes is not None

    def stat(self, sample: int) -> os.stat_result | None:  # noqa: ARG002
        """Of the file that holds the rows: who rewrites one, changes its time. None: it is not known which."""
        return Path(self.file).stat() if self.file else None

    def size_of(self, sample: int) -> int:
        """Bytes of a picture as it is stored; of a set that doesn't know, 0."""
        return 0 if self.sizes is None else int(self.sizes[int(self.key(sample))])

    def encoded(self, sample: int) -> bytes:
        """The picture as it is stored."""
        assert self.fetch is not None
        return self.fetch(self.source, int(self.key(sample)))

    def named(self, sample: int) -> str:
        """Where a picture is to be found."""
        return f"{self.called}[{self.key(sample)}]"


def as_file(source: Any, row: int) -> bytes:
    """A row (PIL image, label) as an uncompressed file, whose decoder gives the same pixels."""
    buffer = io.BytesIO()
    image = source[row][0]
    (image if image.mode in ("L", "RGB") else image.convert("RGB")).save(buffer, "PPM")
    return buffer.getvalue()


def numbered(name: str, labels: Sequence[Any] | Array, classes: Sequence[Any] | None) -> tuple[Ids, tuple[str, ...]]:
    """Labels int64 [n] from 0 on, and the classes' names: those given, where the labels are their places."""
    try:
        values = np.asarray(labels).astype(np.int64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: its labels are no whole numbers: {reason(error)}", _ANOTHER) from error
    if values.ndim != 1 or not len(values):
        raise UserError(f"{name}: its labels have the shape {list(values.shape)}", _ANOTHER)
    if classes is not None and values.min() >= 0 and values.max() < len(classes):
        return values, tuple(", ".join(each) if isinstance(each, tuple | list) else str(each) for each in classes)
    found, places = np.unique(values, return_inverse=True)
    return places.astype(np.int64), tuple(map(str, found.tolist()))
