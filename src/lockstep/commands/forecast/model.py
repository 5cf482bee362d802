"""The arithmetic of a step on N processes: alpha-beta all-reduce, buckets hidden behind the backward pass.

A ring all-reduce of n bytes over N processes sends 2 (N - 1) messages of n / N bytes one after the other, so it takes

    T(N, n) = 2 (N - 1) alpha + 2 (N - 1) / N * n / bandwidth

(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005; Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Seconds and bytes throughout.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Link:
    """What connects the processes."""

    name: str
    alpha_s: float  # latency of one message, software included
    bandwidth: float  # bytes/s of one process, in each direction at once
    stolen_core_s: float = 0.0  # processor time that moving one byte takes from the computation beside it
    error: float = 0.0  # largest relative error of the fit, 0 where nothing was fitted

    def all_reduce_s(self, processes: int, nbytes: float) -> float:
        """Time of an all-reduce."""
        return 2 * (processes - 1) * self.alpha_s + moved(processes, nbytes) / self.bandwidth


def moved(processes: int, nbytes: float) -> float:
    """Bytes that each process sends in a ring all-reduce of `nbytes`."""
    return 2 * (processes - 1) / processes * nbytes


def fit_line(x: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative coefficients of `seconds = x @ coefficients` with the least relative squares.

    Args:
        x: [points][columns], each column not all zero.
        seconds: [points], positive.
    """
    rows = np.asarray(x, dtype=np.float64) / np.asarray(seconds, dtype=np.float64)[:, None]
    used = list(range(rows.shape[1]))
    while used:
        part = rows[:, used]
        scale = np.abs(part).max(axis=0)  # bytes beside message counts: solve in numbers of one size
        found = np.linalg.lstsq(part / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (found >= 0).all():
            return [float(found[used.index(i)]) if i in used else 0.0 for i in range(rows.shape[1])]
        del used[int(np.argmin(found * scale))]
    return [0.0] * rows.shape[1]


def fit_link(name: str, times: Sequence[tuple[int, float, float]], stolen_core_s: float = 0.0) -> Link:
    """The link that explains measured all-reduces best: (processes, bytes, seconds) each, two sizes or more."""
    x = [(2.0 * (n - 1), moved(n, nbytes)) for n, nbytes, _ in times]
    alpha, per_byte = fit_line(x, [seconds for *_, seconds in times])
    link = Link(name, alpha, 1 / per_byte if per_byte else math.inf, stolen_core_s)
    return replace(link, error=max(abs(link.all_reduce_s(n, nbytes) / seconds - 1) for n, nbytes, seconds in times))


@dataclass(frozen=True)
class Timeline:
    """One process's step without any communication; moments count from its start, after the loader."""

    load_s: float  # standing in the loader before it
    ready_s: tuple[float, ...]  # when each bucket of gradients was complete
    backward_s: float  # when the backward pass was over
    total_s: float  # when the weights were updated

    def scaled(self, factor: float) -> "Timeline":
        """Everything so much slower."""
        ready = tuple(moment * factor for moment in self.ready_s)
        return Timeline(self.load_s * factor, ready, self.backward_s * factor, self.total_s * factor)

    def __add__(self, other: "Timeline") -> "Timeline":
        ready = tuple(map(operator.add, self.ready_s, other.ready_s))
        rest = self.backward_s + other.backward_s, self.total_s + other.total_s
        return Timeline(self.load_s + other.load_s, ready, *rest)


@dataclass(frozen=True)
class Curve:
    """Timelines by micro-batch size, measured at some; between them straight lines."""

    points: Mapping[int, Timeline]  # images of one process's micro-batch -> its step

    @property
    def line(self) -> tuple[float, float]:
        """(fixed seconds of a step, seconds for each image of a micro-batch), by least squares."""
        if len(self.points) == 1:
            ((size, only),) = self.points.items()
            return 0.0, only.total_s / size
        fixed, each = fit_line([(1.0, float(size)) for size in self.points], [t.total_s for t in self.points.values()])
        return fixed, each

    def at(self, size: int) -> Timeline:
        """The timeline of a size: measured, between two that were, or by the line beyond them."""
        if size in self.points:
            return self.points[size]
        smaller, larger = [s for s in self.points if s < size], [s for s in self.points if s > size]
        if not smaller or not larger:
            near = max(smaller) if smaller else min(larger)
            fixed, each = self.line
            return self.points[near].scaled((fixed + each * size) / (fixed + each * near))
        low, high = max(smaller), min(larger)
        part = (size - low) / (high - low)
        return self.points[low].scaled(1 - part) + self.points[high].scaled(part)


@dataclass(frozen=True)
class Reductions:
    """What a step sends: the buckets in their order, and small all-reduces that the computation waits for."""

    buckets: tuple[int, ...]  # bytes
    blocking: tuple[int, ...] = ()  # bytes of each, as those of synchronised batch norm


@dataclass(frozen=True)
class Forecast:
    """A step on N processes; the parts add up to it."""

    processes: int
    compute_s: float  # with a core for every thread
    cores_s: float  # what threads that share cores wait for each other
    loader_s: float  # standing in the loader
    exposed_s: float  # standing in the all-reduce
    all_reduce_s: float  # all all-reduces of a step, hidden or not

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.cores_s + self.loader_s + self.exposed_s

    @property
    def hidden(self) -> float:
        """The part of the all-reduce behind which the step goes on: 0 to 1."""
        return 1 - self.exposed_s / self.all_reduce_s if self.all_reduce_s else 0.0

    @property
    def bottleneck(self) -> str:
        """What takes the largest part of the step."""
        parts = {
            "compute": self.compute_s,
            "cores oversubscribed": self.cores_s,
            "loader": self.loader_s,
            "all-reduce": self.exposed_s,
        }
        return max(parts, key=lambda name: parts[name])


def forecast(
    processes: int,
    own: Timeline,
    link: Link,
    sends: Reductions,
    *,
    threads: int = 1,
    crowding: float = 1.0,
    prefetched: bool = False,
) -> Forecast:
    """The step of N processes that each take `own` alone.

    Bucket i starts when it is complete and bucket i - 1 has been reduced; the update starts when the backward pass and
    all buckets are over. Where moving bytes takes processor time, the hidden part costs that much.

    Args:
        processes: N.
        own: the slowest process's timeline: that of the largest share.
        threads: of each process, which share what is stolen from them.
        crowding: threads for each core, 1 or more.
        prefetched: the loader works beside the step, and goes on while the step waits for the all-reduce.
    """
    slow = own.scaled(crowding)
    exposed, all_reduce = 0.0, 0.0
    if processes > 1:
        end = 0.0
        for ready, nbytes in zip(slow.ready_s, sends.buckets, strict=True):
            end = max(end, ready) + link.all_reduce_s(processes, nbytes)
        buckets = sum(link.all_reduce_s(processes, nbytes) for nbytes in sends.buckets)
        exposed = max(0.0, end - slow.backward_s)
        stolen = link.stolen_core_s / threads * moved(processes, sum(sends.buckets))
        exposed += min(1.0, stolen / buckets if buckets else 0.0) * max(0.0, buckets - exposed)
        blocking = sum(link.all_reduce_s(processes, nbytes) for nbytes in sends.blocking)
        exposed, all_reduce = exposed + blocking, buckets + blocking
    load = max(0.0, slow.load_s - exposed) if prefetched else slow.load_s  # it catches up while the step stands
    return Forecast(processes, own.total_s, slow.total_s - own.total_s, load, exposed, all_reduce)


@dataclass(frozen=True)
class Limits:
    """Where scaling stops; None where it does not up to the largest N that was looked at."""

    half: int | None  # the first N with an efficiency below 50 %
    fastest: int  # the N with the shortest step; more processes are no faster
    looked_at: int


def limits(forecasts: Sequence[Forecast]) -> Limits:
    """Where scaling stops, among forecasts for growing N, the first for N = 1."""
    one = forecasts[0].step_s
    half = next((p.processes for p in forecasts if one / p.step_s < 0.5 * p.processes), None)
    fastest = min(forecasts, key=lambda p: p.step_s).processes
    return Limits(half, fastest, forecasts[-1].processes)
