"""What a run is: frozen dataclasses, validated at birth.

`Config` splits in two: the experiment (data, model, optim, link, choose and the fields of `Config` itself) decides the
result; `Execution` and `Recovery` decide only where and how fast it runs and what it survives. None of their fields may
change what is learned, except through rounding and, with `batch_norm="local"`, through the statistics of batch
normalisation.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.config import combinations
from lockstep.config.choose import ChooseConfig
from lockstep.config.data import DataConfig
from lockstep.config.execution import LOG_MIRRORS, Execution, Interval, Recovery, Strategy
from lockstep.config.fields import Floats, Ints, Names, require, split_commas
from lockstep.config.link import LinkConfig
from lockstep.config.model import ModelConfig
from lockstep.config.optim import OPTIMIZERS, OptimConfig, ScheduleName
from lockstep.config.plain import from_plain
from lockstep.config.samples import SamplesConfig
from lockstep.config.settings import Precision, Settings
from lockstep.errors import unknown

__all__ = [
    "LOG_MIRRORS",
    "OPTIMIZERS",
    "ChooseConfig",
    "Config",
    "DataConfig",
    "Execution",
    "Floats",
    "Interval",
    "Ints",
    "LinkConfig",
    "ModelConfig",
    "Names",
    "OptimConfig",
    "Precision",
    "Recovery",
    "SamplesConfig",
    "ScheduleName",
    "Strategy",
    "split_commas",
]

_MOST = 10**9  # samples in a batch, of whose repeats and classes numbers of 64 bits are made


@dataclass(frozen=True)
class Config(Settings):
    """A training run."""

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"--epochs {self.epochs} trains nothing", "Use 1 or more.")
        require(self.batch_size >= 1, f"--batch-size {self.batch_size} is empty", "Use 1 or more.")
        require(self.batch_size <= _MOST, "--batch-size is too large", f"Use {_MOST:,} at most.")
        require(
            0 <= self.accumulate <= self.batch_size,
            f"--accumulate {self.accumulate} cuts a batch of {self.batch_size} into empty pieces",
            f"Use 1 to {self.batch_size}, or auto.",
        )
        combinations.require_sound(self)
        if strange := [name for name in self.recovery.override if not _is_entry(name)]:
            raise unknown(
                "entry", strange[0], sorted(_entries(Config)), "--override names what may differ, as lr,epochs."
            )
        require(
            self.recovery.hang_timeout < self.execution.collective_timeout,
            f"--hang-timeout {self.recovery.hang_timeout:g} is not below --collective-timeout "
            f"{self.execution.collective_timeout:g}",
            "A collective would give up before the report of who keeps it waiting: raise --collective-timeout.",
        )
        nproc, nodes = self.execution.nproc, self.execution.nnodes
        if nproc != "auto":
            self.require_no_fewer(nproc)
            self.require_batch_for(nproc * nodes)

    def require_no_fewer(self, processes: int) -> None:
        """Raise UserError where so many processes on this machine are fewer than a restart may go down to."""
        require(
            self.recovery.min_nproc <= processes,
            f"--min-nproc {self.recovery.min_nproc} is more than --nproc {processes}",
            "It is how few processes a restart may go down to.",
        )

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
            processes <= -(-self.batch_size // group) // max(1, self.accumulate),
            f"a batch of {self.batch_size}{groups}{micro} is smaller than the {processes} processes that share it",
            f"--batch-size is global: give at least {processes * max(1, self.accumulate) * group}, or fewer processes "
            "with --nproc.",
        )

    def with_execution(self, **changed: Any) -> "Config":
        """The config with some fields of its execution changed."""
        return dataclasses.replace(self, execution=dataclasses.replace(self.execution, **changed))

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
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """The inverse of `to_dict`. What is missing keeps its default: an older version wrote it.

        Raises:
            UserError: for an unknown entry or one of another type, naming it, and for values that make no run.
        """
        return typing.cast("Config", from_plain(cls, values, "config"))


def _is_entry(name: str) -> bool:
    """True for what `diff_configs` can leave out: an entry or group by path or last name, as a flag spells it too."""
    plain = name.removeprefix("--").replace("-", "_")
    return plain == "rounding" or plain in _entries(Config)


def _entries(cls: type, before: str = "") -> Iterator[str]:
    for item in dataclasses.fields(cls):
        yield item.name
        yield before + item.name
        if dataclasses.is_dataclass(kind := typing.get_type_hints(cls)[item.name]):
            yield from _entries(typing.cast(type, kind), f"{before}{item.name}.")
