"""What measurements share: the interval of a median, and the processor's name."""

import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_RESAMPLES = 10_000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median (percentiles of the medians of resamples; Efron 1979)."""
    medians = np.median(np.random.default_rng(0).choice(values, (_RESAMPLES, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def cpu_name() -> str:
    """The processor's name, and the widest vector instructions that torch uses on it."""
    import torch

    named = ""
    if (info := Path("/proc/cpuinfo")).exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{named or platform.processor() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
