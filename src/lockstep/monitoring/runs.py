"""A run as any process sees it that can read its folder: its journal's records, and its lock file. Imports no torch.

A journal may be torn or forged: a field is taken where it has the type that it should have, and is missing otherwise.
Nothing here raises for what a journal holds.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.distributed.files import writer
from lockstep.errors import UserError
from lockstep.monitoring.journal import JOURNAL, Reader, kind_of

STATES = ("running", "silent", "ended", "stopped", "failed", "killed")
State = Literal["running", "silent", "ended", "stopped", "failed", "killed"]
ENDS: dict[str, State] = {"completed": "ended", "interrupted": "stopped", "failed": "failed"}
_SILENT_S = 900.0  # without a line of a run on another machine; an epoch of large images may log that rarely
_KINDS = ("run", "step", "eval", "classes", "law", "end")  # of whose records a summary holds the newest


def number(record: Mapping[str, Any], name: str) -> float | None:
    """A finite number of a record; None for anything else, as for the text that stands for NaN."""
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300 or math.isnan(value):
        return None
    return float(value)


def integer(record: Mapping[str, Any], name: str) -> int | None:
    """A whole number of a record that is not negative, and no larger than floats tell apart."""
    value = record.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def text(record: Mapping[str, Any], name: str) -> str:
    """A text of a record; empty for anything else."""
    value = record.get(name)
    return value if isinstance(value, str) else ""


def mapping(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A group of entries of a record; empty for anything else."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


@dataclass
class RunSummary:
    """Where a run stands after the records so far. What its journal does not say is None, or empty."""

    folder: Path
    state: State = "running"
    since: float | None = None  # in this state, in seconds since 1970; killed: since the last sign of life
    newest: dict[str, dict[str, Any]] = field(default_factory=dict)  # kind -> the newest record of it
    last: dict[str, Any] = field(default_factory=dict)  # the newest record
    starts: int = 0  # a resize is none
    resizes: int = 0
    seconds: float | None = None  # of training, all starts that ended together
    best_top1: float | None = None
    faults: Counter[str] = field(default_factory=Counter)  # by kind

    def add(self, record: dict[str, Any]) -> None:
        """Note the next record."""
        self.last, kind = record, record["kind"]
        if kind in _KINDS:
            self.newest[kind] = record
        if kind == "run" and "resized_from" not in record:
            self.starts += 1
        elif kind == "resize":
            self.resizes += 1
        elif kind == "fault" and (len(self.faults) < 20 or text(record, "fault") in self.faults):
            self.faults[text(record, "fault")] += 1
        elif kind == "eval" and (top1 := number(record, "top1")) is not None:
            self.best_top1 = max(top1, self.best_top1 or 0.0)
        elif kind == "end" and (seconds := number(record, "seconds")) is not None:
            self.seconds = (self.seconds or 0.0) + seconds

    def of(self, kind: str) -> dict[str, Any]:
        """The newest record of a kind; empty where there is none."""
        return self.newest.get(kind, {})

    @property
    def config(self) -> dict[str, Any]:
        """As the newest `run` record has it."""
        return mapping(self.of("run"), "config")

    def entry(self, *path: str) -> str:
        """A text of the config by its place, as ("model", "model"); empty where there is none."""
        value = self.config
        for name in path[:-1]:
            value = mapping(value, name)
        return text(value, path[-1])

    @property
    def epochs(self) -> int | None:
        """How many there shall be."""
        return integer(self.config, "epochs")

    @property
    def step(self) -> int | None:
        """Optimizer steps behind it."""
        places = (("step", "step"), ("eval", "step"), ("end", "steps"), ("run", "resumed_from"))
        return max((step for kind, name in places if (step := integer(self.of(kind), name))), default=None)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values: what `lockstep runs` lists."""
        run, step, scores = self.of("run"), self.of("step"), self.of("eval")
        epochs = [epoch for record in (step, scores) if (epoch := integer(record, "epoch")) is not None]
        return {
            "folder": str(self.folder),
            "state": self.state,
            "since": self.since,
            "began": number(run, "time"),  # its processes were started last
            "config": self.config,
            "processes": integer(mapping(run, "world"), "size"),
            "epoch": max(epochs) + 1 if epochs else None,  # under way, or the last one; from 1
            "epochs": self.epochs,
            "step": self.step,
            "lr": number(step, "lr"),
            "train_loss": number(step, "loss"),
            "images_per_s": number(step, "images_per_s"),
            "top1": number(scores, "top1"),  # of the last evaluation, as is the loss
            "best_top1": self.best_top1,
            "loss": number(scores, "loss"),
            "seconds": self.seconds,
            "resumes": max(0, self.starts - 1),
            "resizes": self.resizes,
            "faults": dict(self.faults),
            "error": text(self.last, "error") if self.last.get("kind") == "end" else "",
        }


def summarize(folder: Path, now: float) -> RunSummary | None:
    """Where the run in a folder stands at `now`, in seconds since 1970; None where there is no run."""
    path = folder / JOURNAL
    run, reader = RunSummary(folder), Reader(path)
    steps, last = [b""], b""
    try:
        if not path.is_file():
            return None
        changed = path.stat().st_mtime
        for line in reader.lines():
            last, kind = line, kind_of(line)
            if kind == "step":  # parsed are the last ones alone, which takes a tenth of the time
                steps = [line, steps[0]]  # the newest may be damaged
            elif kind not in ("classes", "checkpoint") and (record := reader.parse(line)) is not None:
                run.add(record)
    except (OSError, UserError):
        return None
    for record in filter(None, map(reader.parse, steps)):
        run.newest["step"] = record
        break
    if not run.newest:
        return None  # no journal of a run, or nothing is left of it
    run.last = reader.parse(last) or run.last
    run.state = _state(run, changed, now)
    sign = run.of("run") if run.state == "running" else run.last
    run.since = number(sign, "time") or changed
    return run


def _state(run: RunSummary, changed: float, now: float) -> State:
    """By the last record; without an `end`, by whether the process that holds the folder lives."""
    if run.last.get("kind") == "end" and (status := text(run.last, "status")) in ENDS:
        return ENDS[status]
    who = writer(run.folder)
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
