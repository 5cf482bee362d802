"""The run's journal: one JSON object a line, written by rank 0, flushed at once.

The types are what writers, readers and the table in docs/guide.md share. NaN and infinity, which JSON lacks, are
written as text: where a number may be one of them, a reader of the file may find text.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from lockstep.processes.files import finite


class RunRecord(TypedDict):
    """A run starts or goes on: what runs, where, on what."""

    kind: Literal["run"]
    config: dict[str, Any]  # Config.to_dict()
    world: dict[str, int | str]  # size, local_size, backend
    pids: list[int]  # by rank
    device: str
    threads: int
    versions: dict[str, str]
    data: dict[str, str]  # name, fingerprint
    parameters: int
    resumed_from: int  # step, 0 for a new run


class Means(TypedDict):
    """Over the steps since the last `step` record."""

    loss: float
    images_per_s: float
    data_wait_ms: float  # per step, of rank 0
    comm_wait_ms: float | None  # per step, of the rank that waited longest for the others' gradients; None: unknown


class StepRecord(Means):
    """A log step: every --log-every steps, and at an epoch's end."""

    kind: Literal["step"]
    step: int
    epoch: int
    samples: int  # trained on since the run began
    lr: float


class Scores(TypedDict):
    """What evaluation found, as `Metrics` names it: fractions, nats, samples."""

    top1: float
    top5: float
    loss: float
    count: int


class EvalRecord(Scores):
    """An evaluation of the whole validation set."""

    kind: Literal["eval"]
    epoch: int
    step: int


class CheckpointRecord(TypedDict):
    """A checkpoint is on the disk."""

    kind: Literal["checkpoint"]
    step: int
    digest: str  # SHA-256 of its manifest, in hex
    bytes: int
    stall_ms: float  # that training waited
    durable_ms: float  # from the call until it was on the device


class HangRecord(TypedDict):
    """The ranks made no progress, and the run ended."""

    kind: Literal["fault"]
    fault: Literal["hang"]
    step: int
    ranks: list[int]  # that held up the rest; empty where none stands out
    cause: str


class RollbackRecord(TypedDict):
    """A loss was not finite, and the run went back to a checkpoint."""

    kind: Literal["fault"]
    fault: Literal["rollback"]
    step: int
    back_to: int  # the checkpoint's step
    skipped: list[int]  # the steps whose batches are left out from now on
    error: str


class SkipRecord(TypedDict):
    """A gradient was not finite, and `--on-nonfinite skip` left the step out."""

    kind: Literal["fault"]
    fault: Literal["skip"]
    step: int  # from 0


class EndRecord(TypedDict):
    """The last record of a process's work, however it ended."""

    kind: Literal["end"]
    status: Literal["completed", "interrupted", "failed"]
    steps: int
    samples: int
    seconds: float
    top1: float | None
    loss: float | None
    ledger_sha256: str
    weights_sha256: str
    processes: int
    skipped: int  # steps that this process left out because a gradient was not finite, as fp16's scaler does too
    peak_memory_gib: list[float]  # by rank and its devices; on a CPU what the process held resident
    error: NotRequired[str]


Record = RunRecord | StepRecord | EvalRecord | CheckpointRecord | HangRecord | RollbackRecord | SkipRecord | EndRecord
Mirror = Callable[[Record], None]


class Journal:
    """`write(record)` appends a record and passes it to the mirrors; without a path it does nothing."""

    def __init__(self, path: Path | None, mirrors: tuple[Mirror, ...] = ()) -> None:
        self.file = path.open("a", encoding="utf-8") if path else None
        self.mirrors = mirrors

    def write(self, record: Record) -> None:
        """Append one record, with the time in seconds since 1970."""
        if self.file is None:
            return
        record = cast(Record, {"kind": record["kind"], "time": round(time.time(), 3), **record})
        self.file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self.file.flush()
        for mirror in self.mirrors:
            mirror(record)

    def close(self) -> None:
        """Close the file; mirrors close themselves on the `end` record."""
        if self.file is not None:
            self.file.close()


def read(path: Path) -> list[Record]:
    """All records of a journal. A last line that a crash cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise
    return records


def end_of(records: Sequence[Record]) -> EndRecord | None:
    """The last record where it is an `end`: None while a run goes on, and after a crash."""
    return records[-1] if records and records[-1]["kind"] == "end" else None
