"""The flags of `lockstep reproduce`. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from lockstep.config import Ints
from lockstep.config.fields import require


@dataclass(frozen=True)
class Reproduce:
    """How to look at a script, and where to write."""

    out: Annotated[str, arg(help_behavior_hint="(default: SCRIPT-lockstep)")] = ""
    """Folder for the recipe, its parts and the proof."""
    steps: int = 10
    """Steps to compare. The script's later epochs are cut to a batch each, for their rates."""
    nproc: int = 0
    """Processes that the script is started with, as by torchrun (0: as `python SCRIPT`)."""
    gpus: int = 2
    """Pretended GPUs, for a script that starts a process for each it finds, or runs on none but a GPU."""
    compare: Ints = (1, 2)
    """Numbers of processes that Lockstep takes the same steps on."""
    timeout: float = 600.0
    """Seconds that the script may take."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"--steps {self.steps} compares nothing", "Use 1 or more.")
        require(self.nproc >= 0, f"--nproc {self.nproc} is negative", "Use 0 for a script that no launcher starts.")
        require(bool(self.compare) and min(self.compare) >= 1, "--compare names no processes", "Give it as 1,2.")
        require(self.timeout > 0, f"--timeout {self.timeout:g} is not positive", "Give seconds, as 600.")
