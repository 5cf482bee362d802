"""Which weights are the best so far, and whether a run is over before its last epoch: `--keep-best`, `--patience`."""

import math
from collections.abc import Mapping

from lockstep.config import ChooseConfig, Config
from lockstep.config.choose import SMALLER_IS_BETTER
from lockstep.training.state import State


def note(choose: ChooseConfig, state: State, found: Mapping[str, object]) -> bool:
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


def value_of(choose: ChooseConfig, found: Mapping[str, object]) -> float | None:
    """The number that `--keep-best` names; None where it is not finite."""
    name = "macro_recall" if choose.keep_best == "balanced-accuracy" else choose.keep_best.replace("-", "_")
    value = found[name]
    assert isinstance(value, (int, float))
    return float(value) if math.isfinite(value) else None


def out_of_patience(config: Config, state: State) -> bool:
    """True where `--patience` evaluations in a row were none better. A function of the state: so it holds on any N."""
    return 0 < config.choose.patience <= state.waited


def over(config: Config, state: State) -> bool:
    """True where the run is complete."""
    return state.epochs >= config.epochs or out_of_patience(config, state)


def _better(choose: ChooseConfig, value: float | None, than: float | None, by: float = 0.0) -> bool:
    if value is None:
        return False
    sign = -1.0 if choose.keep_best in SMALLER_IS_BETTER else 1.0
    return than is None or sign * value > sign * than + by
