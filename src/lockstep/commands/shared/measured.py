"""What measurements share: the interval of a median, who else computed meanwhile, and the processor's name."""

import os
import resource
import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil

from lockstep.processes.proc import cpu_model

BUSY = 0.25  # cores kept by others; below it are the kernel's own threads and the clocks' ticks
AGAIN = "the machine was busy with something else, so measure again"
_IDEAL = 1.3  # times the ratio of the devices: caches make a little more than the ideal possible
_RESAMPLES = 10_000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median (percentiles of the medians of resamples; Efron 1979)."""
    medians = np.median(np.random.default_rng(0).choice(values, (_RESAMPLES, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def beyond(speedup: float, devices: float) -> str:
    """Why a speed-up by so many times the devices is not to be believed, or "": it is more than they can give."""
    return (
        f"a speed-up of {speedup:.3g} is more than its processes can give: {AGAIN}"
        if speedup > _IDEAL * devices
        else ""
    )


def watch_others() -> Callable[[], float]:
    """Begin to watch this process's cores; the answer, asked for later, is how many of them others kept busy meanwhile.

    Others are those that are neither this process nor its ended children. The kernel's clocks tick a hundred times a
    second, so over less than a second it says little.
    """
    began, busy, own = time.monotonic(), _busy_s(), _own_s()

    def others() -> float:
        return max(0.0, _busy_s() - busy - (_own_s() - own)) / max(1e-3, time.monotonic() - began)

    return others


def _busy_s() -> float:
    """Seconds that the cores of this process were not idle, since the machine started."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(psutil.cpu_count() or 1)
    each = psutil.cpu_times(percpu=True)
    return float(sum(sum(t) - t.idle - getattr(t, "iowait", 0.0) for t in (each[k] for k in mine if k < len(each))))


def _own_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def cpu_name() -> str:
    """The processor's name, and the widest vector instructions that torch uses on it."""
    import torch

    return f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"
