"""The report's line charts: which there are, and the geometry that the page draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.commands.report.history import History

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 54, WIDTH - 12, 10, HEIGHT - 38  # of the plot
_DASHES = {"solid": "", "dashed": "6 4", "dotted": "1.5 4"}
_DOTS = 60  # points up to which each has a dot


@dataclass(frozen=True)
class Line:
    """A line that each run may have in a chart."""

    name: str
    curve: str
    dash: str = "solid"
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of the report; `factor` is that of the numbers shown, as 100 for percent."""

    title: str
    unit: str
    lines: Sequence[Line]
    factor: float = 1.0
    zero: bool = True  # its axis begins there
    about: str = ""


CHARTS = (
    Chart(
        "Loss",
        "nats",
        (Line("training", "train loss"), Line("validation", "eval loss", "dashed", dots=True)),
        zero=False,
        about="training: mean since the last log step; dashed: validation",
    ),
    Chart(
        "Accuracy",
        "%",
        (Line("top-1", "eval top1", dots=True), Line("top-5", "eval top5", "dotted")),
        factor=100.0,
        zero=False,
        about="on the validation set; dotted: top-5",
    ),
    Chart("Learning rate", "", (Line("learning rate", "train lr"),)),
    Chart("Images per second", "images/s", (Line("images/s", "train images_per_s"),)),
    Chart(
        "Waiting in each step",
        "ms",
        (Line("for data", "train data_wait_ms"), Line("for gradients", "train comm_wait_ms", "dashed")),
        about="for data; dashed: for gradients of other processes",
    ),
    Chart("Checkpoint stalls", "ms", (Line("stall", "stall_ms", dots=True),)),
)


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with marks at round numbers; `factor`: of the numbers shown."""

    low: float
    high: float
    marks: tuple[float, ...]
    factor: float = 1.0

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    def text(self, value: float) -> str:
        """A mark's label, with as many decimals as its neighbours need."""
        gap = (self.marks[1] - self.marks[0]) * self.factor if len(self.marks) > 1 else 1.0
        number = value * self.factor
        if number and (gap < 1e-4 or abs(number) >= 1e7):
            return f"{number:.{max(0, math.floor(math.log10(abs(number))) - math.floor(math.log10(gap)))}e}"
        return f"{number:,.{max(0, -math.floor(math.log10(gap) + 1e-9))}f}"


def axis(values: Sequence[float], factor: float = 1.0, zero: bool = False, marks: int = 5, tight: bool = False) -> Axis:
    """An axis around all values. `zero`: from 0 on; `tight`: it ends where the values do, as along time."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    ends = (low, high)
    low = min(0.0, low) if zero else low
    if high - low <= max(1e-9 * max(abs(high), abs(low)), 1e-290):
        room = abs(high) * 0.1 or 1.0
        low, high = (low if zero and low == 0 else low - room), high + room
        tight = False
    power = 10.0 ** math.floor(math.log10(factor * (high - low) / marks))
    gap = (
        next(power * n for n in (1, 2, 2.5, 5, 10) if power * n * marks >= factor * (high - low) * (1 - 1e-9)) / factor
    )
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    places = tuple(k * gap for k in range(first, last + 1))
    if tight:
        return Axis(*ends, tuple(mark for mark in places if ends[0] <= mark <= ends[1]), factor)
    return Axis(places[0], places[-1], places, factor)


def charts(runs: Sequence[tuple[str, History]]) -> list[dict[str, Any]]:
    """The charts that there are numbers for, each drawn along steps, epochs and time."""
    alongs = ["step", *(["epoch"] if all(h.steps_per_epoch for _, h in runs) else []), "time"]
    return [
        {"title": chart.title, "unit": chart.unit, "about": chart.about}
        | {"drawings": [_drawing(chart, runs, along) for along in alongs]}
        for chart in CHARTS
        if any(history.points(line.curve) for _, history in runs for line in chart.lines)
    ]


def _time_unit(seconds: float) -> tuple[str, float]:
    """The unit for so long a time, and what to multiply seconds by."""
    for unit, size in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return unit, 1 / size
    return "seconds", 1.0


def _drawing(chart: Chart, runs: Sequence[tuple[str, History]], along: str) -> dict[str, Any]:
    """One chart along one kind of x, in pixels."""

    def x_of(history: History, step: int, seconds: float) -> float:
        return {"step": step, "epoch": step / (history.steps_per_epoch or 1), "time": seconds}[along]

    curves, resumes = [], []
    for number, (name, history) in enumerate(runs):
        before = f"{name}, " if len(runs) > 1 else ""
        for line in chart.lines:
            points = [(x_of(history, step, seconds), value) for step, seconds, value in history.points(line.curve)]
            if points:
                curves.append((number, before + line.name, line, sorted(points)))
        resumes += [(number, x_of(history, step, seconds), before + text) for step, seconds, text in history.resumes]
    unit, per_second = _time_unit(max(history.work for _, history in runs))
    title, factor = (f"{unit} at work", per_second) if along == "time" else (along, 1.0)
    x = axis([x for *_, points in curves for x, _ in points], factor, marks=6, tight=True)
    y = axis([y for *_, points in curves for _, y in points], chart.factor, chart.zero)

    def left(value: float) -> float:
        return round(LEFT + x.place(value) * (RIGHT - LEFT), 1)

    def top(value: float) -> float:
        return round(BOTTOM - y.place(value) * (BOTTOM - TOP), 1)

    newest = [f"{name} {points[-1][1] * chart.factor:.4g}" for _, name, _, points in curves]
    return {
        "along": along,
        "title": title,
        "about": f"{chart.title} by {title}. Last values: {'; '.join(newest[:12])}",
        "x": [x.low, x.high, x.factor],
        "y": [y.low, y.high, y.factor],
        "x_marks": [(left(mark), x.text(mark)) for mark in x.marks],
        "y_marks": [(top(mark), y.text(mark)) for mark in y.marks],
        "resumes": [(run, left(at), name) for run, at, name in resumes if x.low <= at <= x.high],
        "curves": [
            {
                "run": run,
                "name": name,
                "dash": _DASHES[line.dash],
                "points": [(left(at), top(value)) for at, value in points],
                "dots": (line.dots and len(points) <= _DOTS) or len(points) == 1,
            }
            for run, name, line, points in curves
        ],
    }
