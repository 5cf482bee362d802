"""What `lockstep tune` takes, and the choices that it tries on each axis."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lockstep.config import Config, Names
from lockstep.config.fields import require, require_finite
from lockstep.errors import UserError, unknown


class Choice(NamedTuple):
    """One way to train, as the flags that make it."""

    name: str
    config: Config


class Axis(NamedTuple):
    """What is chosen, what a choice changes beside the speed, and the choices, given how it is so far."""

    changes: str
    choices: Callable[[Config, int, bool], list[Choice]]  # config, cores, on GPUs


def _splits(config: Config, cores: int, on_gpus: bool) -> list[Choice]:
    if on_gpus or config.execution.model_parallel > 1:
        return []
    counts = sorted({1, *(n for n in (2, 4, 8, 16) if n < cores), cores})
    fitting = [n for n in counts if n <= config.batch_size // config.accumulate]
    each = [(n, max(1, cores // n)) for n in fitting]
    return [Choice(f"{n} x {t} threads", config.with_execution(nproc=n, threads=t)) for n, t in each]


def _workers(config: Config, cores: int, on_gpus: bool) -> list[Choice]:
    del on_gpus
    counts = sorted({0, 1, 2, 4, 8, config.execution.workers})
    return [Choice(f"{n} workers", config.with_execution(workers=n)) for n in counts if n <= max(2, cores)]


def _layouts(config: Config, cores: int, on_gpus: bool) -> list[Choice]:
    del cores, on_gpus
    if config.model.channels_last:
        return []
    return [Choice("channels_last", replace(config, model=replace(config.model, channels_last=True)))]


def _compiled(config: Config, cores: int, on_gpus: bool) -> list[Choice]:
    del cores
    # torch.compile writes C++ for a CPU, and C for what starts a GPU's kernels
    compiler = shutil.which("g++") or shutil.which("clang++") or (on_gpus and shutil.which("cc"))
    if config.model.compile or not compiler or config.execution.strategy == "fsdp":
        return []
    return [Choice("compile", replace(config, model=replace(config.model, compile=True)))]


def _precisions(config: Config, cores: int, on_gpus: bool) -> list[Choice]:
    del cores, on_gpus
    return [] if config.precision == "bf16" else [Choice("bf16", replace(config, precision="bf16"))]


AXES = {  # in the order in which they are measured: what changes most comes last
    "split": Axis("rounding", _splits),
    "workers": Axis("nothing", _workers),
    "channels_last": Axis("rounding", _layouts),
    "compile": Axis("rounding", _compiled),
    "precision": Axis("products of 8 bits", _precisions),
}


@dataclass(frozen=True)
class Plan:
    """What to tune."""

    axes: Names = ("split", "workers", "channels_last", "compile", "precision")
    """What to choose: split (processes x threads), workers (where images are read from files), channels_last, compile
    (where there is a C++ compiler), precision."""
    rounds: int = 3
    """Rounds of each axis: each measures every choice once, every other round backwards."""
    seconds: float = 1.0
    """How long to measure a choice in a round, its start not counted."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("out",)})

    def __post_init__(self) -> None:
        require_finite(self)
        require(bool(self.axes), "--axes names nothing to choose", "Give one or more, as split,precision.")
        for name in self.axes:
            if name not in AXES:
                raise unknown("axis", name, AXES)
        require(self.rounds >= 2, f"--rounds {self.rounds} gives no interval", "Use 2 or more.")
        require(self.seconds > 0, f"--seconds {self.seconds:g} is not positive", "Give seconds, as 1.")
        if self.config.execution.nnodes > 1:
            raise UserError("tune with --nnodes", "It starts the processes of one machine: leave the flag out.")

    @classmethod
    def of(cls, config: Config) -> "Plan":
        """The plan for a config."""
        return cls(config=config)
