"""Line charts as SVG: one for each way to count along the run, of which the page shows one."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.commands.report.curves import Axis, Point, axis, tight
from lockstep.commands.shared.markup import Markup, joined, tag

WIDTH, HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 10, 38
DASHES = {"solid": "", "dashed": "6 4", "dotted": "1.5 4"}


@dataclass(frozen=True)
class Curve:
    """One line: whose run it is (its colour), what it shows, how it is drawn."""

    run: int
    name: str
    points: Sequence[Point]
    dash: str = "solid"
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A moment of a run on the x axis, as a resume."""

    run: int
    x: float
    name: str


@dataclass(frozen=True)
class Chart:
    """What a line chart needs."""

    title: str
    y_title: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    factor: float = 1.0  # of the numbers on the y axis, as 100 for percent
    zero: bool = False


def svg(chart: Chart, x_title: str, x_factor: float, along: str) -> Markup:
    """The chart with x in one unit. `along`: a name for that unit, by which the page hides and shows it."""
    points = [point for curve in chart.curves for point in curve.points]
    x = tight([x for x, _ in points], x_title, x_factor)
    y = axis([y for _, y in points], chart.y_title, chart.factor, chart.zero)
    last = [f"{curve.name} {_short(curve.points[-1][1] * chart.factor)}" for curve in chart.curves if curve.points]
    about = f"{chart.title} by {x_title}. Last values: {'; '.join(last[:12])}"
    return tag(
        "svg",
        tag("title", about),
        _grid(x, y),
        *(_mark(mark, x) for mark in chart.marks if x.low <= mark.x <= x.high),
        *(_curve(curve, x, y) for curve in chart.curves),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_=f"chart by-{along}",
        role="img",
        tabindex="0",
        data_x=f"{x.low!r} {x.high!r} {x_factor!r}",
        data_y=f"{y.low!r} {y.high!r} {chart.factor!r}",
        data_box=f"{_LEFT} {WIDTH - _RIGHT} {HEIGHT - _BOTTOM} {_TOP}",
        data_unit=x_title,
    )


def _short(value: float) -> str:
    return f"{value:.4g}"


def _x(x: Axis, value: float) -> str:
    return f"{_LEFT + x.place(value) * (WIDTH - _LEFT - _RIGHT):.1f}"


def _y(y: Axis, value: float) -> str:
    return f"{HEIGHT - _BOTTOM - y.place(value) * (HEIGHT - _TOP - _BOTTOM):.1f}"


def _grid(x: Axis, y: Axis) -> Markup:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    lines = joined(tag("path", d=f"M{_LEFT} {_y(y, mark)}H{right}", class_="grid") for mark in y.marks)
    left = joined(tag("text", y.text(mark), x=_LEFT - 6, y=_y(y, mark), class_="tick y") for mark in y.marks)
    below = joined(tag("text", x.text(mark), x=_x(x, mark), y=bottom + 16, class_="tick x") for mark in x.marks)
    titles = tag("text", x.title, x=(_LEFT + right) / 2, y=HEIGHT - 4, class_="tick x")
    edge = tag("path", d=f"M{_LEFT} {bottom}H{right}", class_="axis")
    return tag("g", lines, edge, left, below, titles, aria_hidden="true")


def _curve(curve: Curve, x: Axis, y: Axis) -> Markup:
    places = [f"{_x(x, at)},{_y(y, value)}" for at, value in curve.points]
    line = tag(
        "polyline",
        points=" ".join(places),
        class_="line",
        stroke_dasharray=DASHES[curve.dash] or None,
        data_name=curve.name,
    )
    single = len(places) == 1
    dots = (tag("circle", cx=p.split(",")[0], cy=p.split(",")[1], r=3 if single else 2.2, class_="dot") for p in places)
    return tag(
        "g", line, *(dots if (curve.dots and len(places) <= 60) or single else ()), class_=f"run run-{curve.run}"
    )


def _mark(mark: Mark, x: Axis) -> Markup:
    at = _x(x, mark.x)
    line = tag("path", tag("title", mark.name), d=f"M{at} {_TOP}V{HEIGHT - _BOTTOM}", class_="mark")
    return tag("g", line, class_=f"run run-{mark.run}")
