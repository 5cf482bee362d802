"""Which curves the report has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.commands.report.chart import Chart, Curve, Mark, svg
from lockstep.commands.report.curves import thinned, time_unit
from lockstep.commands.report.runs import Told
from lockstep.commands.report.story import Series
from lockstep.commands.shared.markup import Markup, joined, tag
from lockstep.commands.shared.page import table

_ROWS = 24  # of a chart's table


@dataclass(frozen=True)
class Line:
    """A line that each run may have in a chart: its name, and which numbers."""

    name: str
    of: Callable[[Told], Series | None]
    dash: str = "solid"
    dots: bool = False


@dataclass(frozen=True)
class Kind:
    """A chart of the report."""

    title: str
    unit: str
    lines: Sequence[Line]
    factor: float = 1.0
    zero: bool = False
    about: str = ""


def _train(name: str) -> Callable[[Told], Series | None]:
    return lambda told: told.story.train.get(name)


def _eval(name: str) -> Callable[[Told], Series | None]:
    return lambda told: told.story.evals.get(name)


KINDS = (
    Kind(
        "Loss",
        "nats",
        (Line("training", _train("loss")), Line("validation", _eval("loss"), "dashed", dots=True)),
        about="training: mean since the last log step; dashed: validation",
    ),
    Kind(
        "Accuracy",
        "%",
        (Line("top-1", _eval("top1"), dots=True), Line("top-5", _eval("top5"), "dotted")),
        100.0,
        about="on the validation set; dotted: top-5",
    ),
    Kind("Learning rate", "", (Line("learning rate", _train("lr")),), zero=True),
    Kind("Images per second", "images/s", (Line("images/s", _train("images_per_s")),), zero=True),
    Kind(
        "Waiting in each step",
        "ms",
        (
            Line("for data", _train("data_wait_ms")),
            Line("for gradients of others", _train("comm_wait_ms"), "dashed"),
        ),
        zero=True,
        about="for data; dashed: for gradients of other processes",
    ),
    Kind("Checkpoint stalls", "ms", (Line("stall", lambda told: told.story.stalls, dots=True),), zero=True),
)


def alongs(told: Sequence[Told]) -> list[str]:
    """The ways to count along the runs: by epoch only where all of them tell how long one is."""
    return ["step", *(["epoch"] if all(each.story.steps_per_epoch for each in told) else []), "time"]


def figures(told: Sequence[Told], points: int) -> Iterator[Markup]:
    """The charts that there are numbers for. `points`: of a curve."""
    for kind in KINDS:
        if any(line.of(each) for each in told for line in kind.lines):
            yield _figure(kind, told, points)


def _figure(kind: Kind, told: Sequence[Told], points: int) -> Markup:
    longest = max((a.at + a.seconds for each in told for a in each.story.attempts), default=0.0)
    unit, per_second = time_unit(longest)
    titles = {"step": ("step", 1.0), "epoch": ("epoch", 1.0), "time": (f"{unit} at work", per_second)}
    drawings = [svg(_chart(kind, told, points, along), *titles[along], along) for along in alongs(told)]
    about = " ".join(filter(None, (kind.unit and f"({kind.unit})", kind.about)))
    return tag(
        "figure",
        tag("figcaption", kind.title, " ", tag("small", about)),
        *drawings,
        tag("div", hidden=True, class_="readout", aria_live="polite"),
        tag("details", tag("summary", f"{kind.title} as a table"), _as_table(kind, told)),
    )


def _chart(kind: Kind, told: Sequence[Told], points: int, along: str) -> Chart:
    curves, marks = [], []
    for run, each in enumerate(told):
        of = f"{each.name}, " if len(told) > 1 else ""
        for line in kind.lines:
            found = thinned(line.of(each) or [], points)
            if found:
                drawn = [(_x(each, p[0], p[1], along), p[2]) for p in found]
                curves.append(Curve(run, of + line.name, sorted(drawn), line.dash, line.dots))
        for attempt in each.story.attempts[1:]:
            x = _x(each, attempt.resumed_from, attempt.at, along)
            marks.append(Mark(run, x, f"{of}goes on from step {attempt.resumed_from} on {attempt.processes} processes"))
    return Chart(kind.title, kind.unit, curves, marks[:100], kind.factor, kind.zero)


def _x(told: Told, step: float, seconds: float, along: str) -> float:
    if along == "time":
        return seconds
    return step / (told.story.steps_per_epoch or 1.0) if along == "epoch" else step


def _as_table(kind: Kind, told: Sequence[Told]) -> Markup:
    """For those who read instead of looking: some steps, and what each line has there or last before."""
    several = len(told) > 1
    lines = [(each, line, line.of(each) or []) for each in told for line in kind.lines]
    lines = [entry for entry in lines if entry[2]]
    steps = sorted({int(point[0]) for _, _, series in lines for point in thinned(series, _ROWS)})
    steps = [steps[k * (len(steps) - 1) // (_ROWS - 1)] for k in range(_ROWS)] if len(steps) > _ROWS else steps
    found = [{step: value for step, _, value in series} for _, _, series in lines]
    rows = [
        [step, *(f"{values[step] * kind.factor:.5g}" if step in values else "" for values in found)] for step in steps
    ]
    head = ["step", *(f"{each.name}, {line.name}" if several else line.name for each, line, _ in lines)]
    return table(f"{kind.title}{f' ({kind.unit})' if kind.unit else ''}", head, rows)


def switches(told: Sequence[Told]) -> Markup:
    """What to count along, which runs to show, light or dark: all without a script."""

    def radio(name: str, value: str, words: str, first: bool) -> Markup:
        box = tag("input", type="radio", name=name, value=value, id=f"{name}-{value}", checked=first)
        return tag("label", box, " ", words)

    along = [radio("along", each, f"by {each}", each == "step") for each in alongs(told)]
    theme = [radio("theme", each, each, each == "system") for each in ("system", "light", "dark")]
    shown = [
        tag(
            "label",
            tag("input", type="checkbox", id=f"show-{run}", checked=True),
            tag("span", class_="key", aria_hidden="true"),
            each.name,
            class_=f"switch run-{run}",
        )
        for run, each in enumerate(told)
    ]
    groups = [("Curves", along), ("Theme", theme), *([("Runs", shown)] if len(told) > 1 else [])]
    sets = joined(tag("fieldset", tag("legend", name), *inside) for name, inside in groups)
    return tag("form", sets, class_="controls", aria_label="What the page shows")
