"""A run as anybody can see it from outside, on any machine that sees its folder: by its journal, and its lock file.

A journal may be torn anywhere, or be somebody else's: a field is taken where it has the type that it should have, and
is missing else. Nothing here raises for what a file holds. torch is not imported.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.processes.lock import writer

JOURNAL = "journal.jsonl"
STATES = ("running", "silent", "ended", "stopped", "failed", "killed")
State = Literal["running", "silent", "ended", "stopped", "failed", "killed"]
_ENDS: dict[str, State] = {"completed": "ended", "interrupted": "stopped", "failed": "failed"}
_SILENT_S = 900.0  # without a line of a run on another machine; an epoch of large images may log that rarely
_DEEPEST = 20  # levels of a record; ours have four
_KEPT = ("run", "eval", "stop", "fault", "end", "fit")  # kinds of which every record is kept


@dataclass(frozen=True)
class Glance:
    """Where a run stands. What its journal does not tell is None, or empty."""

    folder: Path
    state: State
    began: float | None  # when its processes were started last, in seconds since 1970
    since: float | None  # in this state; killed: since the last sign of life
    config: dict[str, Any]  # as the newest `run` record has it
    processes: int | None
    epoch: int | None  # under way, or the last one; from 1
    epochs: int | None
    step: int | None
    lr: float | None
    train_loss: float | None
    images_per_s: float | None
    top1: float | None  # of the last evaluation
    best_top1: float | None
    loss: float | None  # of the last evaluation
    seconds: float | None  # of training, all starts together
    resumes: int
    faults: list[str]  # by their kinds, in order
    error: str

    def of(self, *path: str) -> str:
        """A text of the config by its place, as ("model", "model"); empty where there is none."""
        value: Any = self.config
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value if isinstance(value, str) else ""


def number(record: Mapping[str, Any], name: str) -> float | None:
    """A finite number of a record; None for anything else, as for the text that stands for NaN."""
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300 or math.isnan(value):
        return None
    return float(value)


def whole(record: Mapping[str, Any], name: str) -> int | None:
    """A whole number of a record, likewise."""
    value = record.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else None


def text(record: Mapping[str, Any], name: str) -> str:
    """A text of a record; empty for anything else."""
    value = record.get(name)
    return value if isinstance(value, str) else ""


def group(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A group of entries of a record; empty for anything else."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def parsed(line: bytes) -> dict[str, Any] | None:
    """The record that a line of a journal holds; None where it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(record, dict) and isinstance(record.get("kind"), str) and _shallow(record, _DEEPEST)
    return record if sound else None


def _shallow(value: Any, levels: int) -> bool:
    """False for what is nested so deep that walking through it may end in RecursionError."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_shallow(each, levels - 1) for each in inside)


def notable(content: bytes) -> list[dict[str, Any]]:
    """The records of a journal but for most of its `step` and checkpoint lines: the last of each kind is enough.

    45,000 lines take 15 ms, a tenth of what reading them all takes.
    """
    found: list[dict[str, Any]] = []
    steps: list[tuple[int, bytes]] = []
    for line in content.splitlines():
        kind = line[10:22].partition(b'"')[0] if line.startswith(b'{"kind": "') else b""
        if kind == b"step":
            steps = [*steps[-1:], (len(found), line)]  # the last may be torn
        elif (kind.decode("latin-1") in _KEPT or not kind) and (record := parsed(line)):
            found.append(record)
    for place, line in reversed(steps):
        if record := parsed(line):
            found.insert(place, record)
            break
    return found


def look(folder: Path, now: float) -> Glance | None:
    """Where the run in a folder stands at `now`, in seconds since 1970; None where there is no run."""
    path = folder / JOURNAL
    try:
        if not path.is_file():
            return None
        changed, content = path.stat().st_mtime, path.read_bytes()
    except OSError:
        return None
    records = notable(content)
    if not any(record["kind"] in ("run", "step", "eval", "end") for record in records):
        return None  # somebody else's, or nothing is left of it
    return _glance(folder, records, changed, now)


def _glance(folder: Path, records: list[dict[str, Any]], changed: float, now: float) -> Glance:
    runs, evals, ends = ([r for r in records if r["kind"] == kind] for kind in ("run", "eval", "end"))
    steps = [r for r in records if r["kind"] == "step"]
    run, last, step = (list_[-1] if list_ else {} for list_ in (runs, records, steps))
    state, began = _state(folder, last, changed, now), number(run, "time")
    config, since = group(run, "config"), began if state == "running" else number(last, "time") or changed
    found = evals[-1] if evals else {}
    steps_seen = (whole(step, "step"), whole(found, "step"), *(whole(end, "steps") for end in ends[-1:]))
    tops = [top1 for record in evals if (top1 := number(record, "top1")) is not None]
    places = [epoch + 1 for record in (step, found) if (epoch := whole(record, "epoch")) is not None]
    return Glance(
        folder=folder,
        state=state,
        began=began,
        since=since,
        config=config,
        processes=whole(group(run, "world"), "size"),
        epoch=max(places, default=None),
        epochs=whole(config, "epochs"),
        step=max((n for n in steps_seen if n), default=None),
        lr=number(step, "lr"),
        train_loss=number(step, "loss"),
        images_per_s=number(step, "images_per_s"),
        top1=number(found, "top1"),
        best_top1=max(tops, default=None),
        loss=number(found, "loss"),
        seconds=sum(number(end, "seconds") or 0.0 for end in ends) if ends else None,
        resumes=max(0, len(runs) - 1),
        faults=[text(r, "fault") for r in records if r["kind"] == "fault"],
        error=text(last, "error") if last["kind"] == "end" else "",
    )


def _state(folder: Path, last: Mapping[str, Any], changed: float, now: float) -> State:
    """By the last record; without an `end`, by whether the process that holds the folder lives."""
    if last["kind"] == "end" and (status := text(last, "status")) in _ENDS:
        return _ENDS[status]
    who = writer(folder)
    if who in ("none", "killed"):
        return "killed"
    return "silent" if who == "elsewhere" and now - changed > _SILENT_S else "running"


def run_folders(top: Path) -> Iterator[Path]:
    """The run folders at and below a folder, by name. What can't be listed, and links, are passed over."""
    for where, below, files in os.walk(top):
        if JOURNAL in files:
            below.clear()  # its checkpoints and weights
            yield Path(where)
        below.sort()
