"""What `lockstep verify` takes: its own flags beside those of `train`, checked before anything starts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from lockstep.commands.shared.arguments import refuse_launched
from lockstep.config import Config, Ints
from lockstep.errors import UserError

PER_STEP = {"fp32": 4e-6, "tf32": 5e-4, "bf16": 4e-3, "fp16": 5e-4}
"""Relative difference that plain mode grants a step: half a unit in the last place of the type in which factors are
rounded; for fp32, where the sums' own rounding counts, 32 units."""


@dataclass(frozen=True)
class Plan:
    """What to verify."""

    nproc: Annotated[Ints, arg(aliases=["--nproc-per-node"])] = (1, 2, 3)
    """Numbers of processes to compare; the others are compared with the first."""
    steps: int = 30
    """Optimizer steps to compare (at most those of the run)."""
    tolerance: float = 0.0
    """Plain mode: relative difference granted for each step taken (0: by the precision)."""
    float64: bool = True
    """Repeat in float64 what differs: nothing else tells rounding from a fault."""
    patch: str = ""
    """package.module:function(run, world, config), called on every rank before the first step, to replace parts."""
    json: str = ""
    """Write what was found to this file, too."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("nproc",)})

    def __post_init__(self) -> None:
        counts = ",".join(map(str, self.nproc))
        if len(set(self.nproc)) < 2 or len(set(self.nproc)) < len(self.nproc) or min(self.nproc) < 1:
            raise UserError(f"--nproc {counts} compares nothing", "Give different numbers, two or more, as 1,2,4.")
        if self.steps < 1:
            raise UserError(f"--steps {self.steps} takes no step", "Use 1 or more.")
        if not 0 <= self.tolerance < 1:
            raise UserError(f"--tolerance {self.tolerance} is not in [0, 1)", "Give a relative difference, as 1e-5.")
        execution = self.config.execution
        if execution.nnodes > 1 or execution.strategy != "ddp":
            what = f"--strategy {execution.strategy}" if execution.nnodes == 1 else f"--nnodes {execution.nnodes}"
            raise UserError(f"verify with {what}", "It starts numbers of processes on one machine: leave the flag out.")
        if self.config.link.sync_every > 1:
            raise UserError(
                f"verify with --sync-every {self.config.link.sync_every}: between two averagings each process follows "
                "its own share, so results differ with their number by design",
                "Leave it out.",
            )
        self.config.require_batch_for(max(self.nproc))

    @property
    def per_step(self) -> float:
        """The relative difference granted for each step taken; 0 in exact mode, which asks for the same bits."""
        return 0.0 if self.config.exact else self.tolerance or PER_STEP[self.config.precision]

    @property
    def threads(self) -> int:
        """Of each process, the same for every N, since kernels split their sums by them."""
        from lockstep.processes.proc import cores

        return self.config.execution.threads or (1 if self.config.exact else max(1, cores() // max(self.nproc)))

    def config_for(self, processes: int) -> Config:
        """The config on so many processes."""
        return self.config.with_execution(nproc=processes, threads=self.threads)


def check(plan: Plan) -> None:
    """What can be known to be wrong before any process starts."""
    from lockstep.config.objects import load_object
    from lockstep.processes.devices import process_count
    from lockstep.training.folder import check as check_names

    refuse_launched("verify")
    check_names(plan.config)
    for n in plan.nproc:
        process_count(plan.config_for(n).execution)
    if plan.patch and not callable(load_object(plan.patch, "patch")):
        raise UserError(f"--patch {plan.patch} is no function", "It is called with (run, world, config).")
    if plan.json and not Path(plan.json).parent.is_dir():
        raise UserError(f"--json {plan.json}: its folder does not exist", "Make it, or name another file.")
