"""What `lockstep compare` takes, which cells that makes, and the config of each."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from tyro.conf import arg

from lockstep.commands.compare.strategies import Strategy, parse
from lockstep.config import Config, Ints, Names
from lockstep.config.execution import ONE_PROCESS
from lockstep.errors import UserError, unknown

_COUNTS = (1, 2, 4)  # where --nproc is left out, as far as there are cores or GPUs


# a measured run takes no checkpoint, and one that fails is not started again
_UNDISTURBED: dict[str, Any] = {"checkpoint_every": "0", "resume": "never", "max_restarts": 0, "on_hangup": "stop"}


@dataclass(frozen=True)
class Cell:
    """One row of the table: a strategy on a number of processes."""

    strategy: Strategy
    processes: int

    @property
    def name(self) -> str:
        """As in the table: ddp+bf16 x2."""
        return f"{self.strategy.name} x{self.processes}"

    @property
    def folder(self) -> str:
        """The name without its space."""
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Plan:
    """What to compare."""

    strategies: Names = ("single", "ddp")
    """BASE[+MODIFIER...]: single, dp, ddp, fsdp, exact8 (--exact 8); bf16, fp16, tf32, accumulate4, fp16grads,
    bf16grads and powersgd4 (--compress), local8 and diloco8 (--sync-every 8), stages2 (--model-parallel 2), syncbn,
    compile, channels_last."""
    nproc: Annotated[Ints, arg(help_behavior_hint="(default: 1,2,4 as far as there are cores or GPUs)")] = ()
    """Numbers of processes; single and dp are one process."""
    repeats: int = 1
    """Rounds: each runs every row once. Two or more give intervals."""
    baseline: Annotated[str, arg(help_behavior_hint="(default: the first row that can be measured)")] = ""
    """The row that speed-ups refer to, as single-x1."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("nproc", "strategy", *_UNDISTURBED)})

    def __post_init__(self) -> None:
        if not self.strategies:
            raise UserError("--strategies names nothing to compare", "Give one or more, as single,ddp,ddp+bf16.")
        if twice := _twice([parse(text).name for text in self.strategies]):
            raise UserError(f"--strategies: {twice} stands there twice", "Leave one of them out.")
        if twice := _twice(list(map(str, self.nproc))):
            raise UserError(f"--nproc: {twice} stands there twice", "Leave one of them out; see --repeats.")
        if self.nproc and min(self.nproc) < 1:
            raise UserError(f"--nproc {min(self.nproc)} starts no process", "Give 1 or more, as 1,2,4.")
        if self.repeats < 1:
            raise UserError(f"--repeats {self.repeats} measures nothing", "Use 1 or more.")
        if self.config.execution.nnodes > 1:
            raise UserError("compare with --nnodes", "It starts the processes of one machine: leave the flag out.")

    @classmethod
    def of(cls, config: Config, **chosen: Any) -> "Plan":
        """The plan for a config."""
        execution = replace(config.execution, nproc="auto", strategy="ddp")
        recovery = replace(config.recovery, **_UNDISTURBED)
        return cls(config=replace(config, execution=execution, recovery=recovery), **chosen)

    def cells(self, most: int) -> list[Cell]:
        """The rows of the table, in its order; `most`: cores or GPUs, as far as the default numbers of processes go."""
        counts = self.nproc or tuple(n for n in _COUNTS if n <= most)
        ways = [parse(text) for text in self.strategies]
        return [Cell(way, n) for way in ways for n in ((1,) if way.base in ONE_PROCESS else sorted(counts))]

    def config_for(self, cell: Cell, cores: int, on_gpus: bool = False) -> Config:
        """The config of a cell: `cores` CPU threads, and on a CPU --workers too, shared out over its processes.

        Beside a GPU each process keeps its workers: what is compared there are GPUs, not one loader's division.

        Raises:
            UserError: for a strategy that the config, or so many processes, can't have.
        """
        given = self.config.execution
        threads = given.threads or max(1, cores // cell.processes)
        workers = given.workers if on_gpus else given.workers // cell.processes
        return cell.strategy.applied(self.config, nproc=cell.processes, threads=threads, workers=workers, out="")

    def baseline_of(self, cells: list[Cell], possible: list[Cell]) -> Cell:
        """The row that speed-ups refer to. Raises UserError where --baseline names none."""
        if not self.baseline:
            return (possible or cells)[0]
        wanted = self.baseline.replace(" ", "-")
        by_name = {cell.folder: cell for cell in reversed(cells)}
        by_name |= {cell.strategy.name: cell for cell in reversed(cells)}  # alone: on the smallest number of processes
        if wanted not in by_name:
            raise unknown("baseline", self.baseline, [cell.folder for cell in cells], "It is one of the rows.")
        return by_name[wanted]


def _twice(names: list[str]) -> str:
    return next((name for name in names if names.count(name) > 1), "")
