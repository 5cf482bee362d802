"""Pictures kept as they were decoded, in files of some hundred each, mapped by whoever reads them.

A block file: `_MAGIC`, the cache's key, the block's number and count, int64 [count, 3] of height, width and checksum
(a picture of height 0 could not be decoded), SHA-256 of all that, and the pixels, uint8 [h, w, 3] each, filled up to 8
bytes. It gets its name when it is whole, and holds nothing that could be run.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.data.arrays import Array, Ids
from lockstep.errors import UserError, refusal
from lockstep.processes.files import atomic_write

_MAGIC = b"lockstep-cache-1"
_OPEN = 1 << 14  # blocks that a process maps at most; the kernel allows 65,530 maps
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


@dataclass(frozen=True)
class Cache:
    """Where a set's pictures are kept: picture i in block i // each. Pickles as these few words."""

    folder: Path
    key: bytes  # 32, of all that the pixels depend on
    count: int  # pictures
    each: int  # pictures a block
    pixels: bool = True  # False: sizes alone, to know what can be decoded

    @property
    def blocks(self) -> int:
        """Files of a whole cache."""
        return -(-self.count // self.each)

    def path(self, number: int) -> Path:
        """A block's file."""
        return self.folder / f"block-{number:06}.pictures"

    def members(self, number: int) -> range:
        """The pictures of a block."""
        return range(number * self.each, min(self.count, (number + 1) * self.each))

    def fault(self, number: int) -> str:
        """Why a block's file can't be used; nothing where it can. Its head is read, and its size compared."""
        try:
            self.head(number)
        except FileNotFoundError:
            return "it is missing"
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def head(self, number: int) -> Array:
        """Height, width and checksum of a block's pictures, int64 [count, 3].

        Raises:
            OSError, ValueError: where it can't be read, or is torn, another's or damaged.
        """
        path, count = self.path(number), len(self.members(number))
        length = _head_bytes(count)
        with path.open("rb") as file:
            raw, size = file.read(length), os.fstat(file.fileno()).st_size
        if raw[: len(_MAGIC)] != _MAGIC or len(raw) < length:
            raise ValueError("it is torn, or no file of a cache")
        if raw[: _head_bytes(0) - 32] != _opening(self.key, number, count):
            raise ValueError("it is of another cache")
        if hashlib.sha256(raw[:-32]).digest() != raw[-32:]:
            raise ValueError("its head is damaged")
        table = np.frombuffer(raw, "<i8", 3 * count, _head_bytes(0) - 32).reshape(count, 3)
        if size != length + (int(_starts(table)[-1]) if self.pixels else 0):
            raise ValueError("it is torn")
        return table

    def sizes(self) -> Array:
        """Height and width of every picture, int64 [count, 2]. Raises OSError and ValueError as `head`."""
        return np.concatenate([self.head(number)[:, :2] for number in range(self.blocks)])

    def picture(self, number: int) -> Tensor:
        """A picture's pixels, uint8 [3, h, w], as the decoder left them.

        Raises:
            UserError: where they are no longer what was written.
        """
        block, row = divmod(number, self.each)
        pages, starts, table = _mapped(self, block)
        height, width, checksum = table[row].tolist()
        stored = pages[starts[row] : starts[row + 1]]
        if not height or checksum_of(stored) != checksum:
            raise UserError(
                f"{self.path(block)}: picture {row} of it was damaged since it was kept",
                "Remove the file: what it holds is decoded again.",
            )
        return torch.from_numpy(stored[: height * width * 3].reshape(height, width, 3)).permute(2, 0, 1)

    def write(self, number: int, pictures: Sequence[Tensor | None], durable: bool) -> None:
        """Write a block, whole or not at all. pictures: uint8 [3, h, w], None for what can't be decoded. OSError."""
        stored = [None if picture is None else _filled(picture) for picture in pictures]
        table = np.zeros((len(pictures), 3), "<i8")
        for row, (picture, data) in enumerate(zip(pictures, stored, strict=True)):
            if picture is not None and data is not None:
                table[row] = (*picture.shape[1:], checksum_of(data) if self.pixels else 0)
        head = _opening(self.key, number, len(pictures)) + table.tobytes()
        with atomic_write(self.path(number), durable) as temporary, temporary.open("wb") as file:
            file.write(head + hashlib.sha256(head).digest())
            for data in stored if self.pixels else ():
                if data is not None:
                    file.write(data.data)


def checksum_of(stored: Array) -> int:
    """A sum over words of 8 bytes, each times a number of its place, as int64. 11 us for 256 KiB; SHA-256 takes 128."""
    words = stored.view("<u8")
    return int(np.dot(words, _weights(1 << max(0, len(words) - 1).bit_length())[: len(words)]).astype(np.int64))


@lru_cache
def _weights(count: int) -> Array:
    """Odd, so that no single word can change unseen."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (mixed ^ mixed >> np.uint64(32)) * np.uint64(_GOLDEN) | np.uint64(1)


def _filled(picture: Tensor) -> Array:
    """The bytes of [3, h, w], pixel by pixel, filled up to whole words."""
    flat = picture.permute(1, 2, 0).contiguous().numpy().reshape(-1)
    return np.concatenate([flat, np.zeros(-len(flat) % 8, np.uint8)])


def _opening(key: bytes, number: int, count: int) -> bytes:
    return _MAGIC + key + np.array([number, count], "<i8").tobytes()


def _head_bytes(count: int) -> int:
    return len(_MAGIC) + 32 + 16 + 24 * count + 32


def _starts(table: Array) -> Ids:
    """Where pictures begin, and the last one ends, from the first one on: int64 [count + 1]."""
    sizes = table[:, 0] * table[:, 1] * 3
    if (table[:, :2] < 0).any() or (table[:, :2] > 1 << 20).any():
        raise ValueError("its head is damaged")
    return np.concatenate([[0], np.cumsum(sizes + -sizes % 8)]).astype(np.int64)


@lru_cache(_OPEN)
def _mapped(cache: Cache, number: int) -> tuple[Array, Ids, Array]:
    """A block's pixels, where each picture begins, and its table. The map is private: nothing is ever written back."""
    try:
        table = cache.head(number)
        pages = np.memmap(cache.path(number), np.uint8, "c", offset=_head_bytes(len(table)))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{cache.path(number)} can't be read: {refusal(error)}",
            "Start the run again: what is missing is decoded again.",
        ) from error
    return pages, _starts(table), table
