"""The run's journal: one JSON object a line, written by rank 0 and flushed at once; its records, writer and reader.

NaN and infinity, which JSON lacks, are written as text: where a number may be one of them, a reader of the file may
find text.
"""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal, NotRequired, TextIO, TypedDict, cast

from lockstep.distributed.files import to_json, write_error, writing
from lockstep.errors import UserError, refusal

JOURNAL = "journal.jsonl"  # its name in a run folder
_LONGEST = 16 << 20  # bytes of a line: the scores of 20,000 classes take 2 MB
_DEEPEST = 20  # levels of a record; ours have four


class RunRecord(TypedDict):
    """A run starts or goes on: what runs, where, on what."""

    kind: Literal["run"]
    config: dict[str, Any]  # Config.to_dict()
    world: dict[str, int | str]  # size, local_size, backend
    pids: list[int]  # by rank
    devices: list[str]  # by rank
    threads: int
    versions: dict[str, str]
    data: dict[str, str]  # name, fingerprint
    parameters: int
    steps_per_epoch: int
    resumed_from: int  # step, 0 for a new run
    notes: list[str]  # on data and model: how the set was divided, duplicates, what depends on --nproc
    sources: NotRequired[dict[str, str]]  # digests of the user's own code, by what it is
    resized_from: NotRequired[int]  # processes, where these take the place of others; a `resize` record follows


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


class ClassMeans(TypedDict):
    """Means over the classes that have images in the set, as fractions."""

    macro_precision: float
    macro_recall: float  # balanced accuracy
    macro_f1: float
    calibration_error: float  # expected, over 15 bins of confidence
    map: NotRequired[float]  # mean average precision, where images have several labels


class EvalRecord(Scores, ClassMeans):
    """An evaluation of the whole validation set."""

    kind: Literal["eval"]
    epoch: int
    step: int


class ClassesRecord(TypedDict):
    """The same evaluation by class: a list's places are those of `classes`."""

    kind: Literal["classes"]
    epoch: int
    step: int
    classes: list[str]
    images: list[int]  # of the class
    predicted: list[int]  # as it
    correct: list[int]  # of the class, and predicted as it
    precision: list[float]
    recall: list[float]
    f1: list[float]
    average_precision: NotRequired[list[float]]  # where images have several labels
    thresholds: NotRequired[list[float]]  # likewise: the probability from which the class is there, by the best F1
    confusion: NotRequired[list[list[int]]]  # by true class (row) and predicted class; of 100 classes at most


class StopRecord(TypedDict):
    """The run ends before its last epoch, for a reason of its own."""

    kind: Literal["stop"]
    reason: Literal["patience", "max-time"]
    epoch: int
    step: int
    metric: str  # --keep-best
    best: float | None
    best_step: int


class CheckpointRecord(TypedDict):
    """A checkpoint is on the disk."""

    kind: Literal["checkpoint"]
    step: int
    digest: str  # SHA-256 of its manifest, in hex
    checksum: str  # of step and digest: where it doesn't fit, this line was damaged, and not the checkpoint
    bytes: int
    stall_ms: float  # that training waited
    durable_ms: float  # from the call until it was on the device


class FaultRecord(TypedDict):
    """hang: the ranks made no progress, and the run ended. restart: processes were lost and are started again.

    rollback: a loss was not finite, and the run went back to a checkpoint. skip: a gradient was not finite, and the
    step was left out. output, journal: output or a part of this file broke, and the run goes on without it. upload: a
    request to the store of a run that is kept there failed; the run goes on.
    """

    kind: Literal["fault"]
    fault: Literal["hang", "restart", "rollback", "skip", "output", "journal", "upload"]
    step: int  # restart: of the newest checkpoint, 0 where there is none
    cause: NotRequired[str]  # of all but skip
    ranks: NotRequired[list[int]]  # hang: those that held up the rest; empty where none stands out
    processes: NotRequired[int]  # restart: how many are started
    back_to: NotRequired[int]  # rollback: the checkpoint's step
    skipped: NotRequired[list[int]]  # rollback: the steps whose batches are left out from now on


class ResizeRecord(TypedDict):
    """The run goes on with another number of processes, as `lockstep resize` asked."""

    kind: Literal["resize"]
    step: int
    before: int  # processes
    processes: int
    seconds: float  # from the step boundary until the next batch was there


class LawRecord(TypedDict):
    """A step that was taken again, shared out otherwise, came to something else (training/self_check.py)."""

    kind: Literal["law"]
    step: int
    what: str  # one of outcomes.KINDS: each once, and the first alone is printed
    place: str  # of a parameter, a buffer or an attribute
    difference: float  # relative
    message: str


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
    peak_memory_gib: list[float]  # by rank; on a CPU what the process held resident
    error: NotRequired[str]


Record = (
    RunRecord | StepRecord | EvalRecord | ClassesRecord | LawRecord | StopRecord
    | CheckpointRecord | FaultRecord | ResizeRecord | EndRecord
)  # fmt: skip
Logger = Callable[[Record], None]


class Journal:
    """`write(record)` appends a record and passes it to the loggers; without a path it does nothing."""

    def __init__(self, path: Path | None, loggers: tuple[Logger, ...] = ()) -> None:
        self.file: TextIO | None = None
        self.path, self.loggers = path, loggers
        if path is None:
            return
        require_plain(path)
        with writing(path):
            self.file = path.open("a", encoding="utf-8")
            with path.open("rb") as file:  # a line that a crash left without its end is ended
                if size := file.seek(0, os.SEEK_END):
                    file.seek(size - 1)
                    self.file.write("" if file.read() == b"\n" else "\n")

    def write(self, record: Record) -> None:
        """Append one record, with the time in seconds since 1970. Raises UserError where the disk refuses."""
        if self.file is None:
            return
        record = cast(Record, {"kind": record["kind"], "time": round(time.time(), 3), **record})
        line = to_json(record) + "\n"
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as error:
            file, self.file = self.file, None  # the end record will not fit either
            with suppress(OSError):
                file.close()
            raise write_error(cast(Path, self.path), error) from error
        for logger in self.loggers:
            logger(record)

    def leave(self) -> None:
        """Have the loggers close, as on an `end` record: another process goes on with the file and with them."""
        for logger in self.loggers:
            logger(cast(EndRecord, {"kind": "end", "status": "interrupted"}))

    def close(self) -> None:
        """Close the file; loggers close themselves on the `end` record."""
        if self.file is not None:
            self.file.close()


def append(path: Path, record: Record) -> None:
    """One record, from the process that is left to write it: the run's own writer may hang, or have died in a line."""
    with closing(Journal(path)) as journal:
        journal.write(record)


def checksum(step: int, digest: str) -> str:
    """What a checkpoint's record holds of itself."""
    return hashlib.sha256(f"{step} {digest}".encode()).hexdigest()[:16]


def require_plain(path: Path, remedy: str = "Move it away, or name another folder with --out.") -> None:
    """Raise UserError where something else than a file is at this path: a FIFO would be waited for without end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no plain file", remedy)


class Reader:
    """The records of a journal one by one, in memory that does not grow with it; a second pass has the new ones.

    A journal may be torn or damaged anywhere, or forged: a line that holds no record is left out and noted.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.number = path, 0, 0  # bytes and lines behind it
        self._damaged: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self.lines():
            if (record := self.parse(line)) is not None:
                yield record

    def lines(self) -> Iterator[bytes]:
        """The lines that have come since the last pass; a half one is left for the next. Raises UserError."""
        require_plain(self.path)
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.offset:  # another file has taken its place
                    self.offset = self.number = 0
                file.seek(self.offset)
                while line := file.readline(_LONGEST):
                    size = len(line)
                    while size % _LONGEST == 0 and line[-1:] != b"\n" and (line := file.readline(_LONGEST)):
                        size += len(line)  # of what no run writes
                    if size <= _LONGEST and line[-1:] != b"\n" and _record(line) is None:
                        self._note_damage(line, self.number + 1)
                        return
                    self.offset, self.number = self.offset + size, self.number + 1
                    yield line if size <= _LONGEST else b"too long"
        except OSError as error:
            raise UserError(f"can't read {self.path}: {refusal(error)}", "Is it yours to read?") from error

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """The record that the newest of `lines` holds; None, and noted as damage, where it holds none."""
        if (record := _record(line)) is None:
            self._note_damage(line, self.number)
        return record

    @property
    def damage(self) -> str:
        """Which lines can't be read, in words; empty where all can."""
        names = ", ".join(map(str, self._damaged[:5])) + (" and more" if len(self._damaged) > 5 else "")
        return f"{self.path.name}: line {names} can't be read and was left out" if names else ""

    def _note_damage(self, line: bytes, number: int) -> None:
        if line.strip() and len(self._damaged) < 6 and number not in self._damaged:
            self._damaged.append(number)


def kind_of(line: bytes) -> str:
    """The kind of a record by the first bytes of its line, as Journal writes them; empty where it begins otherwise."""
    return line[10:30].partition(b'"')[0].decode("latin-1") if line.startswith(b'{"kind": "') else ""


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    shallow = line.count(b"{") + line.count(b"[") <= _DEEPEST or _is_shallow(record, _DEEPEST)
    return record if shallow else None


def _is_shallow(value: Any, levels: int) -> bool:
    """False for what is nested so deep that walking through it may end in RecursionError."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inside if isinstance(each, dict | list))


def read(path: Path) -> list[Record]:
    """All records of a journal. Raises UserError where it is no file, or can't be read."""
    return cast(list[Record], list(Reader(path)))


def damage(path: Path) -> str:
    """Which lines of a journal can't be read, in words; empty where all can, or there is none."""
    reader = Reader(path)
    deque(reader if path.exists() else (), maxlen=0)
    return reader.damage


def end_of(records: Sequence[Record]) -> EndRecord | None:
    """The last record where it is an `end`: None while a run goes on, and after a crash."""
    return records[-1] if records and records[-1]["kind"] == "end" else None
