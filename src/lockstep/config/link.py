"""What a slow link makes of a run."""

import re
from dataclasses import dataclass
from typing import Literal

from lockstep.config.fields import require, require_finite


@dataclass(frozen=True)
class LinkConfig:
    """For links where the all-reduce takes longer than the step: send less, or less often. See docs/slow-links.md."""

    compress: str = "none"
    """What DDP sends of a gradient: none (all), fp16, bf16, or powersgd:RANK (a product of two thin matrices)."""
    sync_every: int = 1
    """Local SGD: each process takes so many steps alone, then their weights are averaged (1: plain DDP)."""
    outer_lr: float = 1.0
    """With --sync-every: how far to go from the last common weights to the average; DiLoCo uses 0.7."""
    outer_momentum: float = 0.0
    """With --sync-every: Nesterov momentum of these outer steps; DiLoCo uses 0.9."""
    inner_state: Literal["averaged", "private"] = "averaged"
    """With --sync-every: the optimizer's state between two averagings; private: each process keeps its own (DiLoCo's
    paper), which checkpoints hold for all."""

    def __post_init__(self) -> None:
        require_finite(self)
        require(
            re.fullmatch(r"none|fp16|bf16|powersgd:[1-9]\d*", self.compress) is not None,
            f"--compress {self.compress} is unknown",
            "Use none, fp16, bf16, or powersgd:RANK, as powersgd:4.",
        )
        require(self.sync_every >= 1, f"--sync-every {self.sync_every} is not positive", "Use 1 for every step.")
        require(self.outer_lr > 0, f"--outer-lr {self.outer_lr} is not positive", "Use 1 for the plain average.")
        require(
            0 <= self.outer_momentum < 1,
            f"--outer-momentum {self.outer_momentum} is not in [0, 1)",
            "Use 0 for the plain average, 0.9 for DiLoCo.",
        )
        require(
            self.sync_every > 1 or (self.outer_lr, self.outer_momentum, self.inner_state) == (1.0, 0.0, "averaged"),
            "--outer-lr, --outer-momentum and --inner-state belong to --sync-every",
            "Give --sync-every 2 or more, or leave them out.",
        )
        require(
            self.sync_every == 1 or self.compress == "none",
            f"--sync-every {self.sync_every} with --compress {self.compress}: weights are averaged, not gradients",
            "Leave one of the two out.",
        )

    @property
    def powersgd_rank(self) -> int:
        """RANK of powersgd:RANK, else 0."""
        return int(self.compress.partition(":")[2] or 0)
