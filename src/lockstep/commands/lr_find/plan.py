"""What `lockstep lr-find` takes."""

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config import Config
from lockstep.config.fields import require, require_finite
from lockstep.errors import UserError


@dataclass(frozen=True)
class Plan:
    """What to try."""

    lr_min: float = 1e-6
    """The first rate."""
    lr_max: float = 10.0
    """The last rate, if the loss has not risen far above its lowest before."""
    steps: int = 100
    """Steps from the one to the other, each by the same factor."""
    file: str = "lr-find.png"
    """The picture; the numbers stand beside it, as .json."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("out", "log", "resume")})

    def __post_init__(self) -> None:
        require_finite(self)
        require(
            0 < self.lr_min < self.lr_max,
            f"--lr-min {self.lr_min:g} is not between 0 and --lr-max {self.lr_max:g}",
            "Give two rates, as --lr-min 1e-6 --lr-max 10.",
        )
        require(self.steps >= 20, f"--steps {self.steps} give no curve", "Use 20 or more; a usual number is 100.")
        require(self.file.endswith(".png"), f"--file {self.file}: the picture is a .png", "Name it so.")
        if self.config.execution.nnodes > 1:
            raise UserError("lr-find with --nnodes", "It starts the processes of one machine: leave the flag out.")

    @property
    def numbers(self) -> Path:
        """Where the numbers are written."""
        return Path(self.file).with_suffix(".json")
