"""Where an attempt's time went: training, waits, checkpoints, evaluation, and what was done twice."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from lockstep.commands.report.values import count
from lockstep.watch.outside import number


def spent(part: Sequence[Mapping[str, Any]], resumed_from: int, seconds: float, bound: int | None) -> dict[str, float]:
    """Seconds of one attempt by what they went for, as its step windows and the times between records tell.

    Args:
        part: its records.
        resumed_from: the step that it began at.
        seconds: all that it took.
        bound: the step that the next attempt goes on from; None: there is none.
    """
    found: dict[str, float] = {}
    rolled_back, known = rollbacks(part), 0.0

    def add(what: str, lasted: float) -> None:
        nonlocal known
        lasted = max(0.0, min(lasted, seconds - known))  # never more than there was
        found[what] = found.get(what, 0.0) + lasted
        known += lasted

    step, samples = resumed_from, None if resumed_from else 0
    for index, record in enumerate(part):
        kind, here = record.get("kind"), count(record, "step")
        if kind == "step" and here and (speed := number(record, "images_per_s")):
            seen = count(record, "samples") or 0
            steps = max(0, here - step)
            # the samples where an attempt began are in no record of its own: about as many a step as all have
            trained = seen / here * steps if samples is None else max(0, seen - samples)
            trained_s = trained / max(speed, 1e-9)
            waits = {
                "waiting for data": (number(record, "data_wait_ms") or 0.0) * steps / 1e3,
                "waiting for gradients of others": (number(record, "comm_wait_ms") or 0.0) * steps / 1e3,
            }
            step, samples = here, seen
            if (bound is not None and here > bound) or here > rolled_back[index]:
                add("training that was done again", trained_s)
                continue
            for what, wait in waits.items():
                add(what, min(wait, trained_s))
            add("training", trained_s - min(trained_s, sum(waits.values())))
        elif kind == "checkpoint":
            add("checkpoint stalls", (number(record, "stall_ms") or 0.0) / 1e3)
        elif kind == "fault" and record.get("fault") == "hang" and index:
            times = [number(each, "time") for each in (part[index - 1], record)]
            add("hanging", (times[1] or 0.0) - (times[0] or 0.0))
    add("evaluation", sum(_evaluations(part)))
    found["other"] = max(0.0, seconds - known)
    return found


def _evaluations(part: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of each: from the step record before it, at the epoch's end, to its own."""
    return [
        max(0.0, after - before)
        for one, other in pairwise(r for r in part if r.get("kind") in ("step", "eval"))
        if one.get("kind") == "step" and other.get("kind") == "eval"
        if (before := number(one, "time")) is not None and (after := number(other, "time")) is not None
    ]


def rollbacks(part: Sequence[Mapping[str, Any]]) -> list[float]:
    """For each record the step beyond which a rollback after it takes everything back."""
    lowest, found = float("inf"), []
    for record in reversed(part):
        found.append(lowest)
        if record.get("fault") == "rollback" and (back := count(record, "back_to")) is not None:
            lowest = min(lowest, back)
    return found[::-1]
