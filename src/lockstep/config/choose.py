"""Which weights of a run are the best, and when no better ones are to be expected."""

from dataclasses import dataclass
from typing import Literal

from lockstep.config.fields import require, require_at_least, require_finite

Metric = Literal[
    "top1", "top5", "loss", "macro-f1", "macro-precision", "macro-recall", "balanced-accuracy", "calibration-error"
]
SMALLER_IS_BETTER = ("loss", "calibration-error")


@dataclass(frozen=True)
class ChooseConfig:
    """What is kept as the best, and when the run ends before its last epoch."""

    keep_best: Metric = "top1"
    """What weights/best.safetensors is the best by; loss and calibration-error: the smallest, the others: the largest.
    balanced-accuracy is macro-recall."""
    patience: int = 0
    """End after so many evaluations without a better --keep-best (0: off); the schedule is that of all epochs."""
    min_delta: float = 0.0
    """What is better by less than this does not count for --patience."""

    def __post_init__(self) -> None:
        require_finite(self)
        require_at_least(0, self, "patience", "min_delta")
        require(
            self.patience > 0 or self.min_delta == 0,
            f"--min-delta {self.min_delta:g} without --patience ends nothing",
            "Give the number of evaluations to wait, as --patience 5, or leave it out.",
        )
