"""What a run is: frozen dataclasses, checked when they are made.

`Config` splits in two: the experiment (data, samples, model, optim, comm, selection and its own fields) decides the
result; `Execution` and `Recovery` decide only where and how fast it runs and what it survives. None of their fields may
change what is learned, except through rounding and, with `batch_norm="local"`, through batch normalisation.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from lockstep.config.conflicts import check
from lockstep.config.data import DataConfig, SamplesConfig
from lockstep.config.execution import LOG_MIRRORS, Execution, Interval, Recovery, Strategy
from lockstep.config.fields import Arg, Count, Floats, Ints, Names, Positive, flags_of, require, with_values
from lockstep.config.files import entries
from lockstep.config.model import ModelConfig
from lockstep.config.optim import OPTIMIZERS, CommConfig, OptimConfig, ScheduleName, SelectionConfig
from lockstep.errors import unknown

__all__ = [
    "LOG_MIRRORS", "OPTIMIZERS", "CommConfig", "Config", "DataConfig", "Execution", "Floats", "Interval", "Ints",
    "ModelConfig", "Names", "OptimConfig", "Precision", "Recovery", "SamplesConfig", "ScheduleName", "SelectionConfig",
    "Strategy", "Tta",
]  # fmt: skip

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Tta = Literal["none", "mirror", "shift"]


@dataclass(frozen=True)
class Config:
    """A training run."""

    recipe: Annotated[str, Arg(flag=False)] = "digits"
    epochs: Positive = 10
    """Passes over the training set."""
    batch_size: Annotated[int, Arg(least=1, most=10**9)] = 64  # sums over it are made of 64 bits
    """Global batch size: images a step, all processes together."""
    accumulate: Positive = 1
    """Cut each batch into so many micro-batches: less memory, and the same step."""
    exact: Count = 0
    """The same bits on any number of processes up to this. Each batch is cut into so many slices (0: off)."""
    seed: int = 0
    """Seed of weights, order, augmentation and dropout."""
    precision: Precision = "fp32"
    """fp32, tf32, bf16 (mixed precision) or fp16. tf32 is for NVIDIA GPUs; fp16 comes with a gradient scaler."""
    tta: Tta = "none"
    """Evaluate on means of logits: of an image and its mirror image; shift: of those moved by a pixel both ways too."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is not finite: stop; skip that update; or go back and leave the batch out."""
    data: DataConfig = field(default_factory=DataConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    execution: Execution = field(default_factory=Execution)
    recovery: Recovery = field(default_factory=Recovery)

    def __post_init__(self) -> None:
        check(self)
        require(
            self.accumulate <= self.batch_size,
            f"--accumulate {self.accumulate} cuts a batch of {self.batch_size} into empty micro-batches",
            f"Use 1 to {self.batch_size}.",
        )
        require(
            self.exact <= self.batch_size,
            f"--exact {self.exact} of a batch of {self.batch_size}: a slice needs a sample",
            f"Use 1 to {self.batch_size} (0: off).",
        )
        repeats = self.samples.aug_repeats
        require(
            self.batch_size % repeats == 0,
            f"--aug-repeats {repeats} of each image don't fill a batch of {self.batch_size}",
            f"Use a multiple of {repeats} as --batch-size.",
        )
        groups = -(-self.batch_size // max(1, self.model.group))
        require(
            self.accumulate <= groups,
            f"--accumulate {self.accumulate}: a batch of {self.batch_size} is {groups} group(s), which are not cut "
            f"(--batch-norm {self.model.batch_norm})",
            f"Use --accumulate 1 to {groups}, or smaller groups.",
        )
        execution, recovery, flags = self.execution, self.recovery, flags_of(Config).values()
        paths = {name for flag in flags for name in (flag.field, flag.group, f"{flag.group}.{flag.field}")}
        for name in recovery.override:
            if name.removeprefix("--").replace("-", "_") not in (known := {"rounding", *paths}):
                raise unknown("entry", name, known, "--override names what may differ, as lr,epochs.")
        require(
            recovery.hang_timeout < execution.collective_timeout,
            f"--hang-timeout {recovery.hang_timeout:g} is not below --collective-timeout "
            f"{execution.collective_timeout:g}",
            "A collective would give up before the report of who keeps it waiting: raise --collective-timeout.",
        )
        if execution.nproc != "auto":
            self.require_batch_for(execution.nproc * execution.nnodes)

    def require_batch_for(self, processes: int) -> None:
        """Raise UserError where some process would have no sample in a full batch, or no slice."""
        if self.exact:
            require(
                processes <= self.exact,
                f"--exact {self.exact} can't be shared out over {processes} processes",
                f"Use at most --nproc {self.exact}, or more slices.",
            )
            return
        group = self.model.group or 1
        micro = f" in {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        groups = f" in groups of {group}" if group > 1 else ""
        require(
            processes <= -(-self.batch_size // group) // self.accumulate,
            f"a batch of {self.batch_size}{groups}{micro} is smaller than the {processes} processes that share it",
            f"--batch-size is global: give at least {processes * self.accumulate * group}, or fewer processes "
            "with --nproc.",
        )

    def with_execution(self, **changed: Any) -> "Config":
        """The config with some fields of its execution changed."""
        return dataclasses.replace(self, execution=dataclasses.replace(self.execution, **changed))

    def statistics(self, processes: int) -> Literal["local", "global", "groups"]:
        """What batch norm takes its statistics over: one process's images, the micro-batch, or groups.

        On one process torch's own does what "global" means, and a slice of exact mode is a batch of its own.
        """
        if self.model.group:
            return "groups"
        return "local" if self.model.batch_norm == "local" or self.exact or processes == 1 else "global"

    @property
    def lr(self) -> float:
        """The peak learning rate, scaled to the batch size by `optim.scale_lr`."""
        if self.optim.scale_lr == "none":
            return self.optim.lr
        ratio = self.batch_size / self.optim.base_batch_size
        return self.optim.lr * (ratio if self.optim.scale_lr == "linear" else math.sqrt(ratio))

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config") -> "Config":
        """The inverse of `to_dict`. What is missing keeps its default. `where` says in errors whose values they are.
        Raises UserError for an unknown entry or one of another type, naming it, and for values that make no run.
        """
        made: Config = with_values(cls(), entries(values, cls, where))
        return made
