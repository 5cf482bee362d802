"""The line that starts torchrun on each machine, with machines that stay or that come and go."""

import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Any, Self

from tyro.conf import arg

from lockstep.commands.launch_script.plan import Plan
from lockstep.config import Config
from lockstep.config.execution import ONE_PROCESS
from lockstep.config.fields import require


@dataclass(frozen=True)
class TorchrunPlan(Plan):
    """A run by torchrun on machines without a scheduler."""

    master_addr: Annotated[str, arg(aliases=["--ip"], help_behavior_hint="(with --nnodes)")] = ""
    """Address of machine 0."""
    master_port: Annotated[
        int, arg(aliases=["--port"], help_behavior_hint="(default: one that follows from --name)")
    ] = 0
    """Port on machine 0, where the machines meet."""
    min_nnodes: int = 0
    """Elastic: go on with so many machines where others are lost, and take them back (0: all or nothing)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.nnodes == 1 or self.master_addr
        require(known, "several machines need one meeting point", "Give --master-addr, machine 0's address.")
        address = re.fullmatch(r"[\w.:%\[\]-]*", self.master_addr)
        remedy = "Give a host name, or an IPv4 or IPv6 address."
        require(address, f"--master-addr {self.master_addr!r}: not an address", remedy)
        require(0 <= self.master_port < 65536, f"--master-port {self.master_port} is not a port", "Use 1 to 65535.")
        execution = self.config.execution
        require(
            execution.nproc != "auto" or execution.model_parallel == 1,
            f"--model-parallel {execution.model_parallel} without --nproc: torchrun would start a process for each GPU",
            "Give --nproc, the processes of a machine.",
        )
        require(
            0 <= self.min_nnodes <= self.nnodes,
            f"--min-nnodes {self.min_nnodes} with --nnodes {self.nnodes}",
            "It is at most as many as there are; give --nnodes too.",
        )

    @classmethod
    def of(cls, config: Config, **chosen: Any) -> Self:
        """The plan for a recipe's config."""
        execution = config.execution
        return super().of(config, master_addr=execution.master_addr, master_port=execution.master_port, **chosen)


def script(plan: TorchrunPlan) -> str:
    """A line for each machine, under a comment that says which."""
    if plan.nnodes == 1:
        return _line(plan, ["--standalone"])
    from lockstep.processes.rendezvous import ports  # imports torch

    port = plan.master_port or ports(plan.job)[0]
    if not plan.min_nnodes:
        where = [f"--master-addr={plan.master_addr}", f"--master-port={port}"]
        ranks = range(plan.nnodes)
        machines = {f"machine {k}": [f"--nnodes={plan.nnodes}", f"--node-rank={k}", *where] for k in ranks}
    else:
        # by itself torchrun compares host names to find the one that listens, and on some machines none or all do
        names = {f"machine 0, {plan.master_addr}": 1, "each of the others": 0}
        nodes, at = f"--nnodes={plan.min_nnodes}:{plan.nnodes}", f"--rdzv-endpoint={plan.master_addr}:{port}"
        where = [nodes, f"--rdzv-id={plan.job}", "--rdzv-backend=c10d", at]
        machines = {name: [*where, f"--rdzv-conf=is_host={host}"] for name, host in names.items()}
    return "".join(f"# on {name}\n{_line(plan, where)}" for name, where in machines.items())


def _line(plan: Plan, where: list[str]) -> str:
    """torchrun's line; the run folder is named, so that a restart goes on with it."""
    execution = plan.config.execution
    each = "auto" if execution.nproc == "auto" and execution.strategy not in ONE_PROCESS else plan.per_node
    own = [f"--nproc-per-node={each}", f"--max-restarts={plan.config.recovery.max_restarts}"]
    return shlex.join(["torchrun", *where, *own, *train_arguments(plan, f"runs/{plan.job}")]) + "\n"


def train_arguments(plan: Plan, out: str, **changed: str) -> list[str]:
    """`-m lockstep train RECIPE FLAGS`, as torchrun takes it; `out`: the run folder where --out names none."""
    flags = plan.train_flags(nproc="auto", out=plan.config.execution.out or out, **changed)
    own = [argument for flag in flags if flag[0] != "--max-restarts" for argument in flag]
    return ["-m", "lockstep", "train", plan.config.recipe, *own]
