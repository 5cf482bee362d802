"""What a job file is made of: the train flags, and where and on how many machines the job runs."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from tyro.conf import arg

from lockstep.config import Config
from lockstep.config.fields import require
from lockstep.config.flags import changed_flags
from lockstep.config.recipes import recipe

ONE_PROCESS = ("single", "dp")


# which machines the run is on, the job file says, or torchrun
_MACHINES: dict[str, Any] = {"nnodes": 1, "node_rank": 0, "master_addr": "", "master_port": 0}


@dataclass(frozen=True)
class Plan:
    """A run on several machines, whatever starts it there."""

    name: Annotated[str, arg(help_behavior_hint="(default: the recipe's)")] = ""
    """Name of the job."""
    file: Annotated[str, arg(help_behavior_hint="(default: standard output)")] = ""
    """Write to this file."""
    nnodes: Annotated[int, arg(aliases=["--nodes"])] = 1
    """Machines in the run; --nproc is the number of processes on each."""
    config: Config = field(default_factory=Config, metadata={"hidden": tuple(_MACHINES)})

    def __post_init__(self) -> None:
        require(self.nnodes >= 1, f"--nnodes {self.nnodes} is no machine", "Use 1 or more.")
        require(
            bool(re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", self.job)),
            f"--name {self.job}: not a name that every scheduler takes",
            "Use small letters, digits and hyphens, a letter first, at most 52 of them.",
        )
        strategy = self.config.execution.strategy
        require(
            self.nnodes == 1 or strategy not in ONE_PROCESS,
            f"--strategy {strategy} is one process, and --nnodes {self.nnodes} has one on each machine at least",
            "Use --strategy ddp.",
        )
        self.config.require_batch_for(self.per_node * self.nnodes)

    @classmethod
    def of(cls, config: Config, **chosen: Any) -> Self:
        """The plan for a recipe's config."""
        return cls(config=config.with_execution(**_MACHINES), nnodes=config.execution.nnodes, **chosen)

    @property
    def job(self) -> str:
        """The job's name."""
        return self.name or re.sub(r"[^a-z0-9]+", "-", self.config.recipe.lower()).lstrip("-0123456789")[:52].rstrip(
            "-"
        )

    @property
    def per_node(self) -> int:
        """Processes on each machine, as far as that is known here: 1 for auto."""
        execution = self.config.execution
        return 1 if execution.nproc == "auto" or execution.strategy in ONE_PROCESS else execution.nproc

    def train_flags(self, **changed: Any) -> list[list[str]]:
        """The flags that the recipe does not have so already, each with its value; `changed`: fields of Execution."""
        return changed_flags(self.config.with_execution(**changed), recipe(self.config.recipe), _MACHINES)


@dataclass(frozen=True)
class Allotted(Plan):
    """A run for which a scheduler allots machines, and GPUs and cores on them."""

    gpus_per_node: int = 0
    """GPUs on each machine."""
    cpus_per_task: int = 0
    """Cores for each process (0: --threads, or with GPUs 1 + --workers, or 1)."""
    memory: Annotated[str, arg(help_behavior_hint="(default: the cluster's)")] = ""
    """Memory of each machine, as 64G or 64Gi."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, value in (("gpus-per-node", self.gpus_per_node), ("cpus-per-task", self.cpus_per_task)):
            require(value >= 0, f"--{flag} {value} is negative", "Use 0 or more.")
        require(
            not self.config.execution.gpus,
            "--gpus, and the scheduler chooses which GPUs a job gets",
            "Say how many: --gpus-per-node.",
        )
        require(
            not self.gpus_per_node or self.per_node * self._each_drives <= self.gpus_per_node,
            f"--gpus-per-node {self.gpus_per_node} for {self.per_node} process(es) of {self._each_drives} GPU(s)",
            "NCCL takes one process per GPU: raise it, or lower --nproc.",
        )
        require(
            bool(re.fullmatch(r"(\d+([KMGT]i?)?)?", self.memory)),
            f"--memory {self.memory}: not an amount",
            "Give it as 64G or 64Gi.",
        )

    @property
    def per_node(self) -> int:
        """Processes on each machine: --nproc, or one for each GPU, or one."""
        execution = self.config.execution
        if execution.nproc == "auto" and execution.strategy not in ONE_PROCESS:
            return max(1, self.gpus_per_node // self._each_drives)
        return super().per_node

    @property
    def _each_drives(self) -> int:
        return self.config.execution.model_parallel

    @property
    def cores(self) -> int:
        """Cores for each process."""
        execution = self.config.execution
        return self.cpus_per_task or execution.threads or (1 + execution.workers if self.gpus_per_node else 1)
