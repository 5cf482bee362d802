"""Where a run is, the same on all ranks, so any number of them can go on from it; and which weights are the best."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from lockstep.config import Config, SelectionConfig
from lockstep.config.fields import require
from lockstep.config.optim import SMALLER_IS_BETTER
from lockstep.data.order import Ledger
from lockstep.monitoring.journal import Scores
from lockstep.training.evaluation import Metrics


@dataclass
class State:
    """Progress of a run; with the weights and the optimizer's state it is all that a checkpoint holds."""

    steps: int = 0  # taken or skipped: the position in the order
    samples: int = 0  # trained on
    ledger: Ledger = field(default_factory=Ledger)
    epochs: int = 0  # that are over
    metrics: Metrics | None = None  # of the newest evaluation
    best: float | None = None  # the best value so far of what --keep-best names; None: none was finite
    best_step: int = 0  # where it was; 0: nowhere yet
    goal: float | None = None  # what --patience waits for a better one than
    waited: int = 0  # evaluations without one
    skipped: list[int] = field(default_factory=list)  # steps whose batches a rollback left out

    def advance(self, ids: np.ndarray, trained: bool = True) -> None:
        """Note one step over the global batch `ids`."""
        self.steps += 1
        self.samples += len(ids) if trained else 0
        self.ledger.extend(ids if trained else -1 - ids)  # a skipped id leaves its own mark

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        metrics = self.metrics and self.metrics.to_dict()
        return {**asdict(self), "metrics": metrics, "ledger": self.ledger.digest.hex()}

    @classmethod
    def from_dict(cls, values: dict[str, Any], per_epoch: int) -> "State":
        """The inverse of `to_dict`. Raises UserError for values that no run of `per_epoch` steps an epoch can have."""
        _require(isinstance(values, dict) and set(values) == {f.name for f in fields(cls)}, "its entries")
        for name in ("steps", "samples", "epochs", "best_step", "waited"):
            _require(_is_count(values[name]), name)
        _require(values["best_step"] <= values["steps"], "best_step beyond steps")
        into = values["steps"] - values["epochs"] * per_epoch
        _require(0 <= into <= per_epoch, "epochs that are not those of its steps")  # the last one may not be closed yet
        for name in ("best", "goal"):
            value = values[name]
            _require(value is None or (type(value) is float and math.isfinite(value)), name)
        skipped, ledger = values["skipped"], values["ledger"]
        _require(isinstance(skipped, list) and all(map(_is_count, skipped)), "skipped")
        _require(isinstance(ledger, str) and re.fullmatch("[0-9a-f]{64}", ledger) is not None, "ledger")
        metrics = None if values["metrics"] is None else _metrics(values["metrics"])
        return cls(**{**values, "ledger": Ledger(bytes.fromhex(ledger)), "metrics": metrics})


def require_whole(saved: dict[str, Any]) -> None:
    """Raise UserError where a checkpoint's state lacks what a run puts there, beside its progress."""
    kinds = {"config": dict, "data": str, "rounding": dict}
    _require(all(isinstance(saved.get(name), kind) for name, kind in kinds.items()), "its entries")
    _require("progress" in saved, "its entries")
    parts = [name for name, value in Config().to_dict().items() if isinstance(value, dict)]
    _require(all(isinstance(saved["config"].get(name, {}), dict) for name in parts), "config")


def _metrics(values: Any) -> Metrics:
    _require(isinstance(values, dict) and set(values) == set(Scores.__annotations__), "metrics")
    _require(_is_share(values["top1"]) and _is_share(values["top5"]) and _is_count(values["count"]), "metrics")
    _require(type(values["loss"]) in (int, float), "metrics")
    return Metrics(**values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _require(well: bool, what: str) -> None:
    require(
        well,
        f"the checkpoint's state.json holds what no run has written ({what})",
        "It was changed by hand, or by a newer version: go on from another one by --resume PATH.",
    )


def note_result(choose: SelectionConfig, state: State, found: Mapping[str, object]) -> bool:
    """Note an evaluation's numbers, by the journal's names, in `state`; True where its weights are the best so far.

    A value that is not finite is worse than any other. The first evaluation's weights are the best in any case.
    """
    value = value_of(choose, found)
    best = state.best_step == 0 or _better(choose, value, state.best)
    if best:
        state.best, state.best_step = value, state.steps
    if choose.patience:
        if state.goal is None or _better(choose, value, state.goal, choose.min_delta):
            state.goal, state.waited = value, 0
        else:
            state.waited += 1
    return best


def value_of(choose: SelectionConfig, found: Mapping[str, object]) -> float | None:
    """The number that `--keep-best` names; None where it is not finite."""
    name = "macro_recall" if choose.keep_best == "balanced-accuracy" else choose.keep_best.replace("-", "_")
    value = found[name]
    assert isinstance(value, (int, float))
    return float(value) if math.isfinite(value) else None


def out_of_patience(config: Config, state: State) -> bool:
    """True where `--patience` evaluations in a row were none better. A function of the state: so it holds on any N."""
    return 0 < config.selection.patience <= state.waited


def is_over(config: Config, state: State) -> bool:
    """True where the run is complete."""
    return state.epochs >= config.epochs or out_of_patience(config, state)


def _better(choose: SelectionConfig, value: float | None, than: float | None, by: float = 0.0) -> bool:
    if value is None:
        return False
    sign = -1.0 if choose.keep_best in SMALLER_IS_BETTER else 1.0
    return than is None or sign * value > sign * than + by
