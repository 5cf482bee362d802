"""The report as plain values: what stands in the page as JSON, and in the file of --json."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import lockstep
from lockstep.commands.report.curves import thinned
from lockstep.commands.report.runs import Told, differences
from lockstep.commands.report.story import Series
from lockstep.processes.files import finite

FORMAT = 1


def plain(told: Sequence[Told], points: int) -> dict[str, Any]:
    """All of the report but the pictures. `points`: of a curve, at most; each is [step, seconds at work, value]."""
    return {
        "lockstep_report": FORMAT,
        "lockstep": lockstep.__version__,
        "differences": [{"entry": path, "values": values} for path, values in differences(told)],
        "runs": [_run(each, points) for each in told],
    }


def _run(told: Told, points: int) -> dict[str, Any]:
    story = told.story

    def series(found: dict[str, Series]) -> dict[str, Any]:
        return {name: [list(point) for point in thinned(values, points)] for name, values in found.items()}

    mistakes = told.mistakes
    run = {
        "name": told.name,
        "folder": told.folder,
        "config": told.config,
        "command": told.command,
        "steps_per_epoch": story.steps_per_epoch,
        "attempts": [dataclasses.asdict(attempt) for attempt in story.attempts],
        "events": [dataclasses.asdict(event) for event in story.events],
        "train": series(story.train),
        "eval": series(story.evals),
        "checkpoint_stalls_ms": [list(point) for point in thinned(story.stalls, points)],
        "seconds": story.spent,
        "classes": story.classes,
        "end": story.end,
        "damaged_lines": story.damaged,
        "mistakes": {
            "why_not": mistakes.why_not,
            "weights": mistakes.weights,
            "images": mistakes.images,
            "wrong": mistakes.wrong,
            "pairs": [
                {"class": label, "taken_for": taken, "images": images} for label, taken, images in mistakes.pairs
            ],
            "shown": [
                {"sample": m.sample, "class": m.label, "taken_for": m.taken, "confidence": m.confidence}
                for m in mistakes.shown
            ],
        },
    }
    return dict(finite(run))
