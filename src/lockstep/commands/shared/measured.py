"""What measurements share: the interval of a median, and the processor's name."""

from collections.abc import Sequence

import numpy as np

from lockstep.processes.proc import cpu_model

_RESAMPLES = 10_000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median (percentiles of the medians of resamples; Efron 1979)."""
    medians = np.median(np.random.default_rng(0).choice(values, (_RESAMPLES, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def cpu_name() -> str:
    """The processor's name, and the widest vector instructions that torch uses on it."""
    import torch

    return f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"
