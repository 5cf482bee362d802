"""Integers of several processes of one machine, added where they lie: in memory that all of them map.

Through gloo's sockets an int64 sum costs twice a float32 one; here each rank writes its integers once, and reads
everybody's as it turns them into gradients.
"""

import os
import secrets
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep.parallel.fixed_point import from_fixed
from lockstep.processes.world import World

_HEAD = 8  # integers before the others: whose memory it is, and a cache line's distance
_MOST = 8  # ranks: each reads the integers of all, where a ring would have it read a part of them
_AT_ONCE = 1 << 16  # integers that are added while they are in a core's cache


def mapped(world: World, count: int) -> list[Tensor]:
    """For each rank int64 [count] that all ranks see, this rank's to write; empty where that can't be had.

    All ranks call it together and get the same answer. The memory has no name in any folder, and goes with the last
    process that maps it.
    """
    one_machine = 1 < world.size == world.local_size <= _MOST and world.device.type == "cpu"
    if not one_machine or not count or not hasattr(os, "memfd_create"):
        return []
    token, size = secrets.token_bytes(16), _HEAD + count
    own = os.memfd_create("lockstep-sums", os.MFD_CLOEXEC)
    try:
        try:
            os.posix_fallocate(own, 0, 8 * size)  # all of it now: memory that is not there later would end the process
            os.pwrite(own, token, 0)
            place = f"/proc/{os.getpid()}/fd/{own}"
        except OSError:
            place = ""
        others = world.gather([place, token.hex()])
        found = [_opened(path, bytes.fromhex(expected), size) for path, expected in others]
        complete = all(world.gather(None not in found))  # nobody closes before all have opened
    finally:
        os.close(own)
    return [each for each in found if each is not None] if complete else []


def _opened(path: str, token: bytes, size: int) -> Tensor | None:
    """The integers behind a path, None where it is another machine's or another process's."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(descriptor, len(token), 0) != token or os.fstat(descriptor).st_size != 8 * size:
            return None
        # not Python's mmap, which keeps a descriptor open
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.int64)[_HEAD:]
    except (OSError, RuntimeError):  # torch's, where there are no more mappings to be had
        return None
    finally:
        os.close(descriptor)


def write_sum(parts: Sequence[Tensor], out_of: Tensor, into: Tensor) -> None:
    """Write the sum of all ranks' integers [n], taken off its scale, to the n floats of `into`, in memory's order."""
    flat = into.as_strided((into.numel(),), (1,))
    for rows in _chunks(len(flat)):
        some = torch.add(parts[0][rows], parts[1][rows])
        for part in parts[2:]:
            some.add_(part[rows])
        from_fixed(some, out_of, flat[rows])


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + _AT_ONCE) for start in range(0, count, _AT_ONCE))
