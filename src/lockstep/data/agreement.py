"""A user's own sets are the same on every rank, or the run ends before it starts."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lockstep.data.arrays import ImageSet
from lockstep.errors import UserError
from lockstep.processes.world import World
from lockstep.randomness import stream

_PROBES = 32  # samples of a Dataset whose labels are compared: it may take a decoded image each


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within, torch, numpy and Python draw what the run's seed says, on every rank alike; afterwards as before."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    key = stream(seed, "data")
    torch.default_generator.manual_seed(key)
    np.random.seed(key % 2**32)
    random.seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


def members(dataset: Any) -> str:
    """A digest of what a Dataset says of its samples: `indices` and `targets`, its own and of those that it wraps."""
    digest = hashlib.sha256()
    while dataset is not None:
        for name in ("indices", "targets"):
            held = getattr(dataset, name, None)
            if isinstance(held, Sequence | np.ndarray | torch.Tensor):
                plain = held.tolist() if isinstance(held, np.ndarray | torch.Tensor) else list(held)
                digest.update(f"{name} {plain}".encode())
        dataset = getattr(dataset, "dataset", None)
    return digest.hexdigest()


def require_same(sets: Sequence[ImageSet], seed: int, world: World) -> None:
    """Compare sets over the ranks; all call it together.

    Raises:
        UserError: on all ranks, naming the set that is not the same everywhere.
    """
    if world.size == 1:
        return
    with seeded(seed):
        mine = [(len(each), each.fingerprint, _labels(each)) for each in sets]
    everyone = world.gather(mine)
    for number, each in enumerate(sets):
        first = everyone[0][number]
        other = next((rank for rank, theirs in enumerate(everyone) if theirs[number] != first), None)
        if other is not None:
            raise UserError(
                f"{each.name} is not the same set on all ranks: {first[0]:,} samples on rank 0 and "
                f"{everyone[other][number][0]:,} on rank {other}, of which some differ",
                "Each process calls the factory. Split by a generator with a fixed seed, sort what the file system "
                "lists, and draw nothing from the time or the process id.",
            )


def _labels(images: ImageSet) -> list[int]:
    """Of some samples all over the set, where nothing else tells what is in it."""
    if not hasattr(images, "dataset"):
        return []
    ids = np.unique(np.linspace(0, len(images) - 1, _PROBES).astype(np.int64))
    return images.read(ids, None)[1].tolist()
