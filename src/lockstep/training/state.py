"""Where a run is. The same on all ranks, and nothing of it a rank's own, so any number of ranks can go on from it."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lockstep.data.order import EMPTY_LEDGER, extend_ledger
from lockstep.training.evaluation import Metrics


@dataclass
class State:
    """Progress of a run; with the weights and the optimizer's state it is all that a checkpoint holds."""

    steps: int = 0  # taken or skipped: the position in the order
    samples: int = 0  # trained on
    ledger: bytes = EMPTY_LEDGER
    epochs: int = 0  # that are over
    metrics: Metrics | None = None  # of the newest evaluation
    best_top1: float = -1.0
    best_step: int = 0
    skipped: list[int] = field(default_factory=list)  # steps whose batches a rollback left out

    def advance(self, ids: np.ndarray, trained: bool = True) -> None:
        """Note one step over the global batch `ids`."""
        self.steps += 1
        self.samples += len(ids) if trained else 0
        self.ledger = extend_ledger(self.ledger, ids if trained else -1 - ids)  # a skipped id leaves its own mark

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "ledger": self.ledger.hex()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "State":
        """The inverse of `to_dict`."""
        metrics = Metrics(**values["metrics"]) if values["metrics"] else None
        return cls(**{**values, "ledger": bytes.fromhex(values["ledger"]), "metrics": metrics})
