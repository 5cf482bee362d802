"""Torch's, Python's and NumPy's generators, seeded for one sample after the other and put back."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def generators(everyones: bool) -> Iterator[Callable[[int, bool], None]]:
    """Within, `seed(value, everyones)` seeds torch's generator, and with `everyones` Python's and NumPy's as well.

    All are put back afterwards. One intra-op thread: pictures are small, and sums in a convolution would depend on
    their number.
    """
    torchs, threads = torch.default_generator, torch.get_num_threads()
    state = torchs.get_state()
    others = (random.getstate(), np.random.get_state()) if everyones else None

    def seed(value: int, everyones: bool) -> None:
        torchs.manual_seed(value)
        if everyones:
            random.seed(value)
            np.random.seed(value & 0xFFFFFFFF)

    torch.set_num_threads(1)
    try:
        yield seed
    finally:
        torch.set_num_threads(threads)
        torchs.set_state(state)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])
