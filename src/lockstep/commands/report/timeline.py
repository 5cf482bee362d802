"""A run from its start to its end: attempts, pauses, faults, and where the time went."""

from collections.abc import Iterator, Sequence

from lockstep.commands.report.curves import duration
from lockstep.commands.report.runs import Told
from lockstep.commands.report.story import Event
from lockstep.commands.shared.markup import Markup, tag
from lockstep.commands.shared.page import table

_PAUSE = 0.06  # of the track's length, at most, that a pause takes: it may have been days
_EVENTS, _TEXT = 120, 400  # events and characters of each that the page shows
SPENT = (
    "training",
    "waiting for data",
    "waiting for gradients of others",
    "checkpoint stalls",
    "evaluation",
    "training that was done again",
    "other",
    "between attempts",
    "hanging",
)


def tracks(told: Sequence[Told]) -> Iterator[Markup]:
    """A bar for each run, as long as it worked, with its attempts, pauses and faults on it."""
    for run, each in enumerate(told):
        yield tag(
            "div",
            tag("h3", each.name) if len(told) > 1 else None,
            _track(each),
            class_=f"run run-{run}",
        )


def _track(told: Told) -> Markup:
    attempts, parts = told.story.attempts, []
    worked = sum(a.seconds for a in attempts) or 1.0
    pauses = [min(a.pause, _PAUSE * worked) for a in attempts]
    whole, at, places = worked + sum(pauses), 0.0, []

    def style(start: float, length: float) -> str:
        return f"left:{100 * start / whole:.3f}%;width:{100 * length / whole:.3f}%"

    for attempt, pause in zip(attempts, pauses, strict=True):
        if pause:
            parts.append(
                tag("span", class_="pause", style=style(at, pause), title=f"{duration(attempt.pause)} between")
            )
        at += pause
        places.append(at - attempt.at)  # to add to seconds at work
        n = f"{attempt.processes} process{'es' if attempt.processes != 1 else ''}" if attempt.processes else "?"
        words = n if attempt.seconds > 0.12 * whole else str(attempt.processes or "?")
        title = f"{n} from step {attempt.resumed_from} to {attempt.last_step}, {duration(attempt.seconds)}"
        parts.append(tag("span", words, class_="work", style=style(at, attempt.seconds), title=title))
        if (since := _kept_until(told, attempt.at, attempt.seconds)) is not None and attempt.kept_to is not None:
            length = attempt.at + attempt.seconds - since
            parts.append(
                tag("span", class_="again", style=style(at + since - attempt.at, length), title="trained again later")
            )
        at += attempt.seconds
    faults = [event for event in told.story.events if event.kind in ("fault", "lost")]
    for event in faults[:300]:
        left = f"left:{100 * (event.seconds + places[event.attempt]) / whole:.3f}%"
        parts.append(tag("span", class_="flag", style=left, title=f"step {event.step}: {event.text[:_TEXT]}"))
    about = f"{len(attempts)} start(s), {len(faults)} fault(s) in {duration(worked)} at work"
    return tag("div", *parts, class_="track", role="img", aria_label=f"Time line of {told.name}: {about}")


def _kept_until(told: Told, at: float, seconds: float) -> float | None:
    """When an attempt was at the last step that counts, in seconds at work."""
    times = [t for series in told.story.train.values() for _, t, _ in series if at <= t <= at + seconds]
    return max(times, default=at)


def events(told: Sequence[Told]) -> Markup:
    """The same in words."""
    several = len(told) > 1
    rows = [
        [*([each.name] if several else []), duration(event.seconds), f"{event.step:,}", event.text[:_TEXT]]
        for each in told
        for event in _bounded(each)
    ]
    left_out = sum(len(each.story.events) - len(_bounded(each)) for each in told)
    more = f" {left_out} more are left out here; the page's JSON has all." if left_out else ""
    caption = f"What happened. Times are seconds at work, without the pauses between attempts.{more}"
    return table(
        caption, [*(["run"] if several else []), "at", "step", "what"], rows, words=True, label="What happened"
    )


def _bounded(told: Told) -> list[Event]:
    found = told.story.events
    return list(found) if len(found) <= _EVENTS else [*found[: _EVENTS // 2], *found[-_EVENTS // 2 :]]


def spent(told: Sequence[Told]) -> Iterator[Markup]:
    """Bars of 100 %, and the seconds."""
    there = [(k, what) for k, what in enumerate(SPENT) if any(each.story.spent.get(what, 0) >= 5e-4 for each in told)]
    rows = []
    for k, what in there:
        cells: list[object] = [tag("span", tag("span", class_=f"swatch spent-{k}"), what)]
        for each in told:
            seconds, whole = each.story.spent.get(what, 0.0), sum(each.story.spent.values()) or 1.0
            cells.append(f"{duration(seconds)} ({seconds / whole:.1%})" if seconds >= 5e-4 else "0")
        rows.append(cells)
    for run, each in enumerate(told):
        whole = sum(each.story.spent.values()) or 1.0
        bar = (
            tag("i", class_=f"spent-{k}", style=f"width:{100 * each.story.spent.get(what, 0) / whole:.3f}%", title=what)
            for k, what in there
        )
        yield tag(
            "div",
            tag("h3", each.name) if len(told) > 1 else None,
            tag(
                "div",
                *bar,
                class_="share",
                role="img",
                aria_label=f"Where the time of {each.name} went; in the table below",
            ),
            class_=f"run run-{run}",
        )
    yield table(
        "Estimated from the journal's times and means. Other: beginning, ending, writing, and what no record covers.",
        ["", *(each.name for each in told)],
        rows,
        label="Where the time went",
    )
