"""Whether sides train the same experiment: their weights beside the raw loop's, in float64 and as they are timed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peers.task import Task, make_model

Weights = Mapping[str, np.ndarray]
IN_FLOAT64 = 1e-9  # the largest distance there: rounding alone, which a few steps make larger, stays far below
STEPS_IN_FLOAT64 = 10


@dataclass(frozen=True)
class Comparison:
    """How sides are compared: after so many steps in float64, and after others in the precision that is timed."""

    steps: int
    tolerance: float = 1e-3  # of the distance in the timed precision, whose rounding each step makes larger
    steps_in_float64: int = STEPS_IN_FLOAT64
    unordered: Sequence[str] = ()  # sides that see other samples

    def asked(self, precision: str) -> dict[str, int]:
        """Steps by precision."""
        return {"fp64": self.steps_in_float64, precision: self.steps}


def distance(weights: Weights, other: Weights, start: Weights) -> float:
    """|weights - other| / |other - start|, over all floating-point entries."""
    names = [name for name, value in start.items() if value.dtype.kind == "f"]
    if missing := set(names) - set(weights):
        raise RuntimeError(f"no weights called {', '.join(sorted(missing))}")
    apart = sum(float(((weights[n].astype(np.float64) - other[n]) ** 2).sum()) for n in names)
    moved = sum(float(((other[n].astype(np.float64) - start[n]) ** 2).sum()) for n in names)
    return (apart / moved) ** 0.5


def apart(task: Task, weights: Mapping[str, Weights], precision: str, comparison: Comparison) -> dict[str, float]:
    """Each side's distance from the first one's weights.

    Args:
        task: of the first side.
        weights: by side, after the comparison's steps in `precision`.
        precision: fp64 or the task's.
        comparison: what is compared and how near it has to be.

    Raises:
        RuntimeError: naming the sides whose weights are others.
    """
    start = {n: v.numpy() for n, v in make_model(replace(task, plain=True, precision=precision)).state_dict().items()}
    first, *others = weights
    found = {n: distance(weights[n], weights[first], start) for n in others if n not in comparison.unordered}
    exactly, nearly = (comparison.steps_in_float64, IN_FLOAT64), (comparison.steps, comparison.tolerance)
    steps, limit = exactly if precision == "fp64" else nearly
    if wrong := {name: value for name, value in found.items() if not value <= limit}:
        raise RuntimeError(f"other weights than {first} after {steps} steps in {precision}: {wrong}")
    return found
