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
        require(self.samples >= 1, f"--samples {self.samples} leaves nothing to train on", "Use 1 or more.")
        require(self.epochs >= 1, f"--epochs {self.epochs} trains nothing", "Use 1 or more.")
        require(self.timeout > 0, f"--timeout {self.timeout:g} is not positive", "Give seconds, as 600.")
        if self.format not in ("text", "json"):
            raise UserError(f"there is no format {self.format!r}", "text or json.")
