"""The process's own generators, seeded for each pass, for draws that are keyed by no sample.

The key is the run's seed, the step and the micro-batch (in exact mode: the slice), and no rank: a choice that is drawn
for a whole batch, as to leave a layer out, is the same on all ranks.
"""

import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from lockstep.randomness import bits_np, stream

_TOGETHER = 64  # steps whose seeds are hashed in one go: one by one they would cost a step microseconds each


def seeding(devices: Sequence[torch.device]) -> Callable[[int], None]:
    """A function that seeds torch's generators of the host and of `devices`; microseconds, no synchronisation.

    The first device is the current one. Each of several has draws of its own.
    """
    seed_host = torch.default_generator.manual_seed
    if devices[0].type == "cpu":
        return seed_host  # type: ignore[return-value]
    seed_current: Callable[[int], object] = torch.get_device_module(devices[0]).manual_seed

    def seed_all(seed: int) -> None:
        seed_host(seed)
        seed_current(seed)
        for number, device in enumerate(devices[1:], 1):
            with torch.accelerator.device_index(device.index):
                seed_current(stream(seed, "device", number))

    return seed_all


def pass_seed(seed: int, step: int, micro: int) -> int:
    """What a pass's generators are seeded with."""
    return _seeds(seed, micro, step // _TOGETHER)[step % _TOGETHER]


@lru_cache(maxsize=1 << 10)
def _seeds(seed: int, micro: int, block: int) -> list[int]:
    steps = np.arange(block * _TOGETHER, (block + 1) * _TOGETHER)
    found: list[int] = bits_np(stream(seed, "dropout", micro), steps).tolist()
    return found


def seed_host(seed: int) -> None:
    """Seed Python's and numpy's generator: 5 us."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, on all devices, of numpy and of Python."""
    torch.manual_seed(seed)
    seed_host(seed)


class HostGenerators:
    """Python's and numpy's generator, seeded for each pass, once anything has drawn from them.

    Most models never draw from them, and seeding would cost a small step a tenth of its time. So in a process's first
    step they are seeded; if nothing has drawn by its end, they get a seed of the run alone and are left, until a glance
    at their memory shows that something has drawn.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.used: bool | None = None  # None: the first step is under way
        self._first = -1
        self._seen: object = None

    def begin(self, step: int, micro: int) -> None:
        """Before a pass."""
        if not self.used:
            unmoved = _glance() == self._seen
            if self.used is None and self._first in (-1, step):
                self.used = True if self._first == step and not unmoved else None
                self._first = step
            elif unmoved:
                if self.used is None:
                    seed_host(stream(self.seed, "undrawn"))
                    self.used, self._seen = False, _glance()
                return
            else:
                self.used = True
        seed_host(pass_seed(self.seed, step, micro))
        self._seen = _glance()


_WORDS = 624  # of a Mersenne twister's state; how many of them are spent is beside them in memory


@cache
def _memory() -> tuple[ctypes.Array[Any], ctypes.Array[Any]] | None:
    """The words of Python's generator and of numpy's, where they lie in memory as they are known to; reading is quick.

    In the first one the number of spent words comes first, in the second one last.
    """
    words = ctypes.c_uint32 * (_WORDS + 1)
    legacy: Any = np.random
    numpys: Any = legacy.get_state(legacy=False)
    if numpys["bit_generator"] != "MT19937" or sys.implementation.name != "cpython":
        return None
    method: Any = random.getstate  # of the module's own generator
    pythons = words.from_address(id(method.__self__) + object.__basicsize__)
    theirs = words.from_address(legacy.get_bit_generator().ctypes.state_address)
    *state, spent = random.getstate()[1]
    known = [*pythons] == [spent, *state] and [*theirs] == [*numpys["state"]["key"], numpys["state"]["pos"]]
    return (pythons, theirs) if known else None


def _glance() -> object:
    """What another draw changes; never the same where it can't be seen."""
    if (found := _memory()) is None:
        return object()
    pythons, theirs = found
    return pythons[0], pythons[1], theirs[0], theirs[_WORDS]
