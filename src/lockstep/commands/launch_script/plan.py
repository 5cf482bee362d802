"""What a job file is made of: the train flags, and where and on how many machines the job runs."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from tyro.conf import arg

from lockstep.config import Config
from lockstep.config.execution import ONE_PROCESS
from lockstep.config.fields import require, require_at_least
from lockstep.config.flags import changed_flags
from lockstep.config.recipes import recipe

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
        sound, rule = re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", self.job), "small letters, digits and hyphens"
        message = f"--name {self.job}: not a name that every scheduler takes"
        require(sound, message, f"Use {rule}, a letter first, at most 52 of them.")
        strategy = self.config.execution.strategy
        message = f"--strategy {strategy} is one process, and --nnodes {self.nnodes} has one on each machine at least"
        require(self.nnodes == 1 or strategy not in ONE_PROCESS, message, "Use --strategy ddp.")
        self.config.require_batch_for(self.per_node * self.nnodes)

    @classmethod
    def of(cls, config: Config, **chosen: Any) -> Self:
        """The plan for a recipe's config."""
        return cls(config=config.with_execution(**_MACHINES), nnodes=config.execution.nnodes, **chosen)

    @property
    def job(self) -> str:
        """The job's name."""
        from_recipe = re.sub(r"[^a-z0-9]+", "-", self.config.recipe.lower()).lstrip("-0123456789")
        return self.name or from_recipe[:52].rstrip("-")

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
        require_at_least(0, self, "gpus_per_node", "cpus_per_task")
        execution, gpus = self.config.execution, self.gpus_per_node
        message = "--gpus, and the scheduler chooses which GPUs a job gets"
        require(not execution.gpus, message, "Say how many: --gpus-per-node.")
        enough = not gpus or self.per_node * execution.model_parallel <= gpus
        message = f"--gpus-per-node {gpus} for {self.per_node} process(es) of {execution.model_parallel} GPU(s)"
        require(enough, message, "NCCL takes one process per GPU: raise it, or lower --nproc.")
        amount = re.fullmatch(r"(\d+([KMGT]i?)?)?", self.memory)
        require(amount, f"--memory {self.memory}: not an amount", "Give it as 64G or 64Gi.")

    @property
    def per_node(self) -> int:
        """Processes on each machine: --nproc, or one for each GPU, or one."""
        execution = self.config.execution
        if execution.nproc == "auto" and execution.strategy not in ONE_PROCESS:
            return max(1, self.gpus_per_node // execution.model_parallel)
        return super().per_node

    @property
    def cores(self) -> int:
        """Cores for each process."""
        execution = self.config.execution
        return self.cpus_per_task or execution.threads or (1 + execution.workers if self.gpus_per_node else 1)
