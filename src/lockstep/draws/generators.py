"""Torch's own generators, for draws that are keyed by the piece and not by its samples."""

from collections.abc import Callable, Sequence

import torch

from lockstep.randomness import stream


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
