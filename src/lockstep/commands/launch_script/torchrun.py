"""The line that starts torchrun on each machine, with machines that stay or that come and go."""

import shlex
from dataclasses import dataclass
from typing import Annotated, Any, Self

from tyro.conf import arg

from lockstep.commands.launch_script.plan import ONE_PROCESS, Plan
from lockstep.config import Config
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
        require(
            self.nnodes == 1 or bool(self.master_addr),
            "several machines need one meeting point",
            "Give --master-addr, machine 0's address.",
        )
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
        return _line(plan, ["--standalone"]) + "\n"
    port = plan.master_port or _port(plan.job)
    at = f"{plan.master_addr}:{port}"
    if not plan.min_nnodes:
        where = [f"--master-addr={plan.master_addr}", f"--master-port={port}"]
        lines = [
            f"# on machine {rank}\n" + _line(plan, [f"--nnodes={plan.nnodes}", f"--node-rank={rank}", *where])
            for rank in range(plan.nnodes)
        ]
        return "\n".join(lines) + "\n"
    meeting = [
        f"--nnodes={plan.min_nnodes}:{plan.nnodes}",
        f"--rdzv-id={plan.job}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={at}",
    ]
    # by itself torchrun compares host names to find the one that listens, and on some machines none or all of them do
    first, others = ([*meeting, f"--rdzv-conf=is_host={host}"] for host in (1, 0))
    return f"# on machine 0, {plan.master_addr}\n{_line(plan, first)}\n# on each of the others\n{_line(plan, others)}\n"


def _port(job: str) -> int:
    from lockstep.processes.rendezvous import ports  # imports torch

    return ports(job)[0]


def _line(plan: Plan, meeting: list[str]) -> str:
    """torchrun's line; the run folder is named, so that a restart goes on with it."""
    recovery, execution = plan.config.recovery, plan.config.execution
    each = "auto" if execution.nproc == "auto" and execution.strategy not in ONE_PROCESS else plan.per_node
    own = [f"--nproc-per-node={each}", f"--max-restarts={recovery.max_restarts}"]
    words = ["torchrun", *meeting, *own, *train_words(plan, f"runs/{plan.job}")]
    return shlex.join(words)


def train_words(plan: Plan, out: str, **changed: str) -> list[str]:
    """`-m lockstep train RECIPE FLAGS`, as torchrun takes it; `out`: the run folder where --out names none."""
    execution = plan.config.execution
    flags = plan.train_flags(nproc="auto", out=execution.out or out, **changed)
    own = [word for words in flags if words[0] != "--max-restarts" for word in words]
    return ["-m", "lockstep", "train", plan.config.recipe, *own]
