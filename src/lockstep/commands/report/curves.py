"""Curves of a bounded number of points, and axes with round numbers on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]  # x, y


def thinned(points: Sequence[tuple[float, ...]], limit: int) -> list[tuple[float, ...]]:
    """At most `limit` points (4 or more): the first, the last, and of each stretch between the lowest and the highest.

    So what stands out is still there. Points are compared by their last number.
    """
    if len(points) <= limit:
        return list(points)
    stretches = (limit - 2) // 2
    kept = [points[0]]
    inner = points[1:-1]
    for k in range(stretches):
        part = inner[k * len(inner) // stretches : (k + 1) * len(inner) // stretches]
        found = {min(range(len(part)), key=lambda i: part[i][-1]), max(range(len(part)), key=lambda i: part[i][-1])}
        kept += [part[i] for i in sorted(found)]
    return [*kept, points[-1]]


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with marks at round numbers; `factor`: of the numbers shown."""

    low: float
    high: float
    marks: tuple[float, ...]
    title: str = ""
    factor: float = 1.0

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    def text(self, value: float) -> str:
        """A mark's label, with as many decimals as its neighbours need."""
        gap = (self.marks[1] - self.marks[0]) * self.factor if len(self.marks) > 1 else 1.0
        shown = value * self.factor
        if shown and (gap < 1e-4 or abs(shown) >= 1e7):
            return f"{shown:.{max(0, math.floor(math.log10(abs(shown))) - math.floor(math.log10(gap)))}e}"
        return f"{shown:,.{max(0, -math.floor(math.log10(gap) + 1e-9))}f}"


def axis(values: Sequence[float], title: str = "", factor: float = 1.0, zero: bool = False, marks: int = 5) -> Axis:
    """An axis around all values; `zero`: from 0 on."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(0.0, low) if zero else low
    if high - low <= max(1e-9 * max(abs(high), abs(low)), 1e-290):
        room = abs(high) * 0.1 or 1.0
        low, high = (low if zero and low == 0 else low - room), high + room
    gap = _round(factor * (high - low) / marks) / factor
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return Axis(first * gap, last * gap, tuple(k * gap for k in range(first, last + 1)), title, factor)


def tight(values: Sequence[float], title: str, factor: float = 1.0, marks: int = 6) -> Axis:
    """An axis that ends where the values do, as along time."""
    whole = axis(values, title, factor, marks=marks)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high <= low:
        return whole
    return Axis(low, high, tuple(mark for mark in whole.marks if low <= mark <= high), title, factor)


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for so long a time, and what to multiply seconds by."""
    for unit, size in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return unit, 1 / size
    return "seconds", 1.0


def duration(seconds: float) -> str:
    """In words: 45 s, 3 min 20 s, 2 h 05 min, 3 d 4 h; with blanks at which no line breaks."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if seconds < 10:
        said = f"{seconds:.1f} s"
    elif days:
        said = f"{days} d {h} h"
    elif hours:
        said = f"{hours} h {m:02d} min"
    else:
        said = f"{minutes} min {s:02d} s" if minutes else f"{s} s"
    return said.replace(" ", "\N{NO-BREAK SPACE}")


def _round(gap: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(gap))
    return next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= gap * (1 - 1e-9))
