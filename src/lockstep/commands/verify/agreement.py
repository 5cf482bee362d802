"""Two traces side by side: each quantity equal, within tolerance or different, by how much, and where it begins.

Differences are relative to the largest magnitude of the tensor (or of the whole trajectory). A tensor far smaller than
the model's largest one is measured against a thousandth of that: a bias in front of batch norm holds only rounding.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lockstep.commands.verify.trace import Trace

Verdict = Literal["equal", "within tolerance", "different", "none"]

REPORTED = 1e-12  # of float64 sums that are made for the trace alone, and so are added over ranks as they come
_FLOOR = 1e-3
_METRICS = 1e-3  # top-1 and top-5 in plain mode, besides one image: near-ties fall either way

_RESULTS = ("loss", "gradient norm", "weights", "buffers")
_MATHS = ("images", "learning rate", *_RESULTS)  # what a re-run can find something about

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Row:
    """What was found for one quantity."""

    quantity: str
    verdict: Verdict
    largest: float = 0.0  # relative difference
    step: int = 0  # the first one beyond tolerance (of any difference, where all are within), from 1; 0: not by step
    where: str = ""  # tensor, or in prose

    @property
    def holds(self) -> bool:
        """True where the mode's claim holds for this quantity."""
        return self.verdict != "different"

    @property
    def detail(self) -> str:
        """Largest difference, first step and tensor, on one line."""
        first = f"from step {self.step}" if self.step else ""
        size = f"{self.largest:.1e}" if self.largest else ""
        return ", ".join(part for part in (size, first, self.where) if part)


@dataclass(frozen=True)
class Comparison:
    """N processes against the first number, by quantity."""

    base: Trace
    other: Trace
    rows: list[Row]

    def row(self, quantity: str) -> Row:
        """The row of a quantity."""
        return next(row for row in self.rows if row.quantity == quantity)

    @property
    def holds(self) -> bool:
        """True where the mode's claim holds for every quantity."""
        return all(row.holds for row in self.rows)

    @property
    def largest(self) -> float:
        """The largest difference of the results; inf where one became non-finite."""
        return max(self.row(quantity).largest for quantity in _RESULTS)

    @property
    def first_step(self) -> int:
        """The first step beyond tolerance of what a re-run can explain; 0 for none."""
        rows = map(self.row, _MATHS)
        return min((row.step for row in rows if not row.holds and row.step), default=0)


def compare(base: Trace, other: Trace, per_step: float) -> Comparison:
    """All quantities of two traces of one config. per_step: the tolerance, 0 for bits."""
    repeated = " and ".join(f"N = {trace.processes}" for trace in (base, other) if trace.repeats)
    note = f"epoch 2 repeats epoch 1 ({repeated})" if repeated else ""
    limits = per_step * np.arange(1, len(base.loss) + 1)
    rows = [
        replace(_exact("ledger", base.ledger, other.ledger), where=note),
        _exact("images", base.images, other.images),
        _numbers("learning rate", base.lr, other.lr, 0 * limits),
        _numbers("loss", base.loss, other.loss, np.maximum(limits, REPORTED)),
        _numbers("gradient norm", base.norm, other.norm, np.maximum(limits, REPORTED)),
        _state("weights", base, other, limits, slice(0, base.parameters)),
        _state("buffers", base, other, limits, slice(base.parameters, None)),
        _replicas(other),
    ]
    if base.metrics is not None and other.metrics is not None:
        rows.append(metrics(base.metrics, other.metrics, limits[-1]))
    return Comparison(base, other, rows)


def metrics(base: dict[str, float], other: dict[str, float], tolerance: float) -> Row:
    """The evaluation row; tolerance 0 asks for equality."""
    if base == other:
        return Row("evaluation", "equal")
    loss = _relative(np.array(base["loss"]), np.array(other["loss"]), np.array(abs(base["loss"]))).item()
    flips = max(abs(base[k] - other[k]) for k in ("top1", "top5"))
    allowed = _METRICS + 1 / base["count"] if tolerance else 0.0
    close = base["count"] == other["count"] and flips <= allowed and loss <= tolerance
    both = "; ".join(f"{k} {base[k]:.6g} and {other[k]:.6g}" for k in base if base[k] != other[k])
    return Row("evaluation", "within tolerance" if close else "different", max(loss, flips), where=both)


def _exact(quantity: str, base: Sequence[Any], other: Sequence[Any]) -> Row:
    changed = np.array([[a != b] for a, b in itertools.zip_longest(base, other)])
    return _judge(quantity, np.zeros(changed.shape), np.zeros(len(changed)), changed)


def _numbers(quantity: str, base: Sequence[Any], other: Sequence[Any], limits: Array) -> Row:
    """A number for each step, or one for each parameter group."""
    a, b = (np.array(values, dtype=np.float64).reshape(len(values), -1) for values in (base, other))
    if a.shape != b.shape:
        return Row(quantity, "different", math.inf, 1)
    return _judge(quantity, _relative(a, b, np.abs(a[np.isfinite(a)]).max(initial=0.0)), limits)


def _state(quantity: str, base: Trace, other: Trace, limits: Array, part: slice) -> Row:
    """Weights or buffers: the samples of each step, then all entries of the last."""
    names = base.names[part]
    if not names:
        return Row(quantity, "none")
    if base.names != other.names or len(base.loss) != len(other.loss):
        return Row(quantity, "different", math.inf, 1, "the tensors' names, or how many steps there are")
    changed = np.array(base.digests)[:, part] != np.array(other.digests)[:, part]
    row = _judge(quantity, _differences(base, other)[:, part], np.append(limits, limits[-1]), changed, names)
    return replace(row, step=min(row.step, len(limits)))


def _judge(
    quantity: str, by_step: Array, limits: Array, changed: Array | None = None, names: Sequence[str] = ()
) -> Row:
    """The row of relative differences, float64 [steps, columns] with these names, and of what is granted at each step.

    `changed`: bool [steps, columns], where more is known than the differences show. A limit of 0 grants no change.
    """
    there = by_step > 0
    changed = there if changed is None else there | changed
    if not changed.any():
        return Row(quantity, "equal")
    over = np.where(limits[:, None] > 0, by_step > limits[:, None], changed)
    found = next(mask for mask in (over, there, changed) if mask.any())
    first = int(np.argmax(found.any(1)))
    column = int(np.argmax(np.where(found[first], by_step[first], -1.0)))
    verdict: Verdict = "different" if over.any() else "within tolerance"
    return Row(quantity, verdict, by_step.max().item(), first + 1, names[column] if names else "")


def _relative(a: Array, b: Array, scale: Array) -> Array:
    """|a - b| / scale; 0 where both are the same (both nan too), inf where one is not finite or the scale is 0."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = np.abs(a - b) / scale
    return np.where(same, 0.0, np.where(np.isfinite(difference), difference, math.inf))


def _floored(base: Trace) -> Array:
    """The tensors' magnitudes [steps + 1, tensors], not below a part of the largest floating one of their kind."""
    out = base.kept["scales"].numpy().copy()
    floats = np.array([base.kept[f"final/{name}"].is_floating_point() for name in base.names], dtype=bool)
    kind = np.arange(len(floats)) < base.parameters
    for group in (floats & kind, floats & ~kind):
        out[:, group] = np.maximum(out[:, group], _FLOOR * out[:, group].max(1, keepdims=True, initial=0.0))
    return out


def _differences(base: Trace, other: Trace) -> Array:
    """Largest relative difference of each tensor: its samples after each step, all at the end: [steps + 1, tensors]."""
    columns = []
    for name, scales in zip(base.names, _floored(base).T, strict=True):
        column = []
        for kind, scale in (("samples", scales[:-1]), ("final", scales[-1:])):
            a, b = (trace.kept[f"{kind}/{name}"].double().numpy().reshape(len(scale), -1) for trace in (base, other))
            column.append(_relative(a, b, scale[:, None]).max(1, initial=0.0))
        columns.append(np.concatenate(column))
    return np.array(columns).T


def _replicas(trace: Trace) -> Row:
    """Whether all ranks of one run had the same weights and the same order."""
    if trace.processes == 1:
        return Row("replicas", "none")
    if not trace.diverged:
        return Row("replicas", "equal")
    step, rank, what = min(trace.diverged)
    return Row("replicas", "different", step=step + 1, where=f"{what} of rank {rank} and of rank 0")
