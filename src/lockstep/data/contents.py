"""What pictures are told apart by: a hash of each one's content, computed by all processes together and kept."""

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from lockstep.data.arrays import Array, Ids
from lockstep.data.folder import FolderSet
from lockstep.errors import UserError
from lockstep.processes.files import atomic_write
from lockstep.processes.world import World

_WORTH_S = 2.0  # hashing that takes longer is told, and what came of it is kept
_NUMBERS = 2  # int64 of a hash: 128 bits, so that a billion pictures have no two by chance


def contents(images: FolderSet, world: World, ids: Ids | None = None) -> Array:
    """The first 128 bits of SHA-256 of the pictures as they are stored, int64 [n, 2]; all ranks call it together.

    Each rank reads its share. What took longer than two seconds is kept below ~/.cache/lockstep (or XDG_CACHE_HOME) and
    used again for files whose size, inode and times of change are the same.

    Raises:
        UserError: for a file that can't be read, and where the ranks' machines don't list the same files.
    """
    chosen = np.arange(len(images), dtype=np.int64) if ids is None else ids
    require_same_list(images, world)
    kept, begun = Kept(images), time.monotonic()
    table = np.zeros((len(chosen), 2 * _NUMBERS), np.int64)  # what the file was, and what was in it
    share = world.share(len(chosen))
    hashed = 0
    mine = chosen[share].tolist()
    for row, sample in _told(mine, share.start, images.name, world.rank == 0):
        try:
            known = kept.mark(sample)
            found = kept.get(known)
            if found is None:
                found = _numbers(hashlib.sha256(images.encoded(sample)).digest())
                hashed += 1
        except OSError as error:
            raise UserError(f"{images.where(sample)}: {error.strerror}", "Put it back, or remove it.") from error
        table[row] = (*known, *found)
    world.sum(torch.from_numpy(table))  # the others hold zeros there
    worth = world.largest([int(hashed > 0 and time.monotonic() - begun > _WORTH_S)])[0]
    if worth and world.local_rank == 0:
        kept.write(table)
    return table[:, _NUMBERS:]


def require_same_list(images: FolderSet, world: World) -> None:
    """Raise UserError on all ranks where they have not all found the same files: a hash would be of another one."""
    digest = hashlib.sha256(images.paths + images.labels.tobytes()).hexdigest()
    everyone = world.gather([len(images), digest])
    if other := next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), 0):
        raise UserError(
            f"{images.name} holds {everyone[0][0]:,} files on rank 0 and {everyone[other][0]:,} on rank {other}, or "
            "some are called otherwise",
            "Give every machine the same copy of the data.",
        )


def _numbers(digest: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(digest[: 8 * _NUMBERS], "<i8").tolist())


def _told(samples: list[int], first_row: int, name: str, here: bool) -> Iterator[tuple[int, int]]:
    """Rows and samples, with a line on standard error about each tenth once it has taken two seconds."""
    begun, told = time.monotonic(), 0
    for place, sample in enumerate(samples):
        yield first_row + place, sample
        tenth = 10 * (place + 1) // len(samples)
        if here and tenth > told and time.monotonic() - begun > _WORTH_S:
            told = tenth
            print(f"hashing the pictures of {name}: {10 * tenth} %", file=sys.stderr, flush=True)


class Kept:
    """Hashes of earlier runs, by a mark of the file. Their own file opens with a SHA-256 of the rest."""

    def __init__(self, images: FolderSet) -> None:
        self.images = images
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = hashlib.sha256(images.name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self.path = home / "lockstep" / "contents" / name
        self.known = {tuple(row[:_NUMBERS]): tuple(row[_NUMBERS:]) for row in self._read().tolist()}

    def _read(self) -> Array:
        empty = np.empty((0, 2 * _NUMBERS), "<i8")
        try:
            raw = self.path.read_bytes()
        except OSError:  # not kept yet, or not for this user to read: hashed again
            return empty
        whole = hashlib.sha256(raw[32:]).digest() == raw[:32] and len(raw) % (16 * _NUMBERS) == 0
        return np.frombuffer(raw[32:], "<i8").reshape(-1, 2 * _NUMBERS) if whole else empty

    def mark(self, sample: int) -> tuple[int, ...]:
        """Of a file as it is now: another content comes with another time of change. Raises OSError."""
        stated = self.images.stat(sample)
        if stated is None:
            return (0,) * _NUMBERS
        values = (self.images.key(sample), stated.st_size, stated.st_mtime_ns, stated.st_ctime_ns, stated.st_ino)
        return _numbers(hashlib.sha256(repr(values).encode("utf-8", "surrogatepass")).digest())

    def get(self, mark: tuple[int, ...]) -> tuple[int, ...] | None:
        """The hash of a file with this mark, where it is known."""
        return self.known.get(mark) if any(mark) else None

    def write(self, table: Array) -> None:
        """Keep marks and hashes, int64 [n, 4]. Where the system refuses, the next run hashes again."""
        body = table.astype("<i8").tobytes()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path, durable=False) as temporary:
                temporary.write_bytes(hashlib.sha256(body).digest() + body)
        except OSError as error:
            print(f"note: hashes are not kept in {self.path.parent}: {error.strerror}", file=sys.stderr)
