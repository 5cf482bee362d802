"""What the run's journal holds: the types that writers, readers and the table in docs/guide.md share.

NaN and infinity, which JSON lacks, are written as text: where a number may be one of them, a reader of the file may
find text.
"""

from collections.abc import Callable
from typing import Any, Literal, NotRequired, TypedDict


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
    notes: list[str]  # what was said of data and model: how the set was divided, duplicates, what depends on --nproc


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
    predicted: list[int]  # taken for it
    right: list[int]  # both
    precision: list[float]
    recall: list[float]
    f1: list[float]
    confusion: NotRequired[list[list[int]]]  # by true class (row) and what it was taken for; of 100 classes at most


class FitRecord(TypedDict):
    """How many micro-batches `--accumulate auto` found."""

    kind: Literal["fit"]
    accumulate: int
    tried: list[int]  # empty where nothing is tried, on a CPU
    peak_gib: float  # of the rank whose trial took most
    free_gib: float  # of the device, before


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
    seal: str  # of step and digest: where it doesn't fit, this line was damaged, and not the checkpoint
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


class TroubleRecord(TypedDict):
    """Something broke that the run does without: its output, or a part of this file."""

    kind: Literal["fault"]
    fault: Literal["output", "journal"]
    step: int
    cause: str


class RestartRecord(TypedDict):
    """Processes were killed or hung, and the launcher starts them again; it writes this when all of them are gone."""

    kind: Literal["fault"]
    fault: Literal["restart"]
    step: int  # of the newest checkpoint; 0: there is none
    cause: str
    processes: int  # that it starts now


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


FaultRecord = HangRecord | RestartRecord | RollbackRecord | SkipRecord | TroubleRecord
Record = (
    RunRecord
    | StepRecord
    | EvalRecord
    | ClassesRecord
    | FitRecord
    | StopRecord
    | CheckpointRecord
    | FaultRecord
    | EndRecord
)
Mirror = Callable[[Record], None]
