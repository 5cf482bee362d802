"""Torch's own generators, for draws that are keyed by the piece and not by its samples."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from lockstep.randomness import bits_np, stream

_TOGETHER = 64  # steps whose seeds are hashed in one go: one by one they would cost a step microseconds each


def reseeding(devices: Sequence[torch.device]) -> Callable[[int], object]:
    """A function that seeds the generators which dropout on `devices` draws from; microseconds, no synchronisation.

    The first is the current device. Each of several has masks of its own.
    """
    if devices[0].type == "cpu":
        return torch.default_generator.manual_seed
    seed_current: Callable[[int], object] = torch.get_device_module(devices[0]).manual_seed

    def seed_all(seed: int) -> None:
        seed_current(seed)
        for number, device in enumerate(devices[1:], 1):
            with torch.accelerator.device_index(device.index):
                seed_current(stream(seed, "device", number))

    return seed_all if len(devices) > 1 else seed_current


def piece_seed(seed: int, step: int, key: int) -> int:
    """What a piece's generators are seeded with: its own in each step, over all ranks (`Piece.key`)."""
    return _seeds(seed, key, step // _TOGETHER)[step % _TOGETHER]


@lru_cache(maxsize=1 << 10)
def _seeds(seed: int, key: int, block: int) -> list[int]:
    steps = np.arange(block * _TOGETHER, (block + 1) * _TOGETHER)
    found: list[int] = bits_np(stream(seed, "dropout", key), steps).tolist()
    return found
