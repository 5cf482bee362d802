"""The flags of `lockstep audit`. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from lockstep.config.fields import Ints, require
from lockstep.errors import UserError


@dataclass(frozen=True)
class Audit:
    """How to run somebody's script."""

    nproc: Annotated[Ints, arg(aliases=["--nproc-per-node"])] = (1, 2, 4)
    """Numbers of processes to run the script on, one after the other."""
    nnodes: int = 1
    """Machines to pretend: where N can be divided by it, each has its share of the ranks, from local rank 0."""
    cuda: bool = True
    """Pretend GPUs, one for each process: torch.cuda answers, tensors lie in memory, and gloo does NCCL's work."""
    samples: int = 256
    """The most samples that are kept of a data set."""
    epochs: int = 2
    """Training epochs after which the script is ended."""
    timeout: float = 600.0
    """Seconds that the script has on each number of processes."""
    format: str = "text"
    """How findings are written: text or json."""

    def __post_init__(self) -> None:
        if not self.nproc or min(self.nproc) < 1:
            raise UserError("--nproc takes numbers of processes from 1", "As --nproc 1,2,4.")
        require(self.nnodes >= 1, f"--nnodes {self.nnodes} leaves no machine", "Use 1 or more.")
        if self.nnodes > 1 and all(each % self.nnodes for each in self.nproc):
            given = ",".join(map(str, self.nproc))
            raise UserError(
                f"--nproc {given} can't be shared out to {self.nnodes} machines", "As --nproc 1,4 --nnodes 2."
            )
        require(self.samples >= 1, f"--samples {self.samples} leaves nothing to train on", "Use 1 or more.")
        require(self.epochs >= 1, f"--epochs {self.epochs} trains nothing", "Use 1 or more.")
        require(self.timeout > 0, f"--timeout {self.timeout:g} is not positive", "Give seconds, as 600.")
        if self.format not in ("text", "json"):
            raise UserError(f"there is no format {self.format!r}", "text or json.")
