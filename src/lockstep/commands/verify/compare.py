"""Two traces side by side: each quantity equal, within tolerance or different, by how much, and where that begins.

Differences are relative to the largest magnitude of the tensor (or of the whole trajectory). A tensor far smaller than
the largest one of its kind is measured against a thousandth of that: a bias in front of batch norm holds only rounding.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.commands.verify.trace import KINDS, Trace
from lockstep.errors import UserError

Verdict = Literal["equal", "within tolerance", "different", "none"]
Array = np.ndarray[Any, np.dtype[Any]]

REPORTED = 1e-12  # of float64 sums that are made for the trace alone, and so are added over ranks as they come
BOUND, BOUND_NORMED = 1e-10, 1e-8  # what is rounding in float64, without and with batch norm
_SMALL = 16.0  # times the tolerance for gradients, which are small sums of large terms
_FLOOR = 1e-3
_METRICS = 1e-3  # top-1 and top-5 in plain mode, besides one image: near-ties fall either way
_RESULTS = ("loss", "gradient norm", "gradients", "optimizer", "weights", "buffers")  # as a step makes them


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
    """A run against the first, by quantity."""

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
    def equal(self) -> bool:
        """True where nothing that a step leaves differs in a single bit."""
        return all(row.verdict in ("equal", "none") for row in self.rows if row.quantity not in _RESULTS[:2])

    @property
    def largest(self) -> float:
        """The largest difference of the results; inf where a run became non-finite, or what is no number differs."""
        others = [row for row in self.rows if row.quantity not in (*_RESULTS, "evaluation")]
        return math.inf if any(not row.holds for row in others) else max(self.row(name).largest for name in _RESULTS)

    @property
    def first_step(self) -> int:
        """The first step beyond tolerance; 0 for none."""
        return min((row.step for row in self.rows if not row.holds and row.step), default=0)

    @property
    def reason(self) -> str:
        """What differs first, for people; empty where the claim holds. What comes first explains what follows."""
        found = [row for row in self.rows if not row.holds]
        plain = {"ledger": "the samples of a step depend on it", "replicas": "", "images": "",
                 "skipped steps": "a step is left out: a gradient was not finite"}  # fmt: skip
        skipped = next((row.step for row in found if row.quantity == "skipped steps"), math.inf)
        for row in found:
            if row.quantity in plain and not (row.quantity == "ledger" and skipped <= row.step):
                what = f" ({plain[row.quantity] or row.where})" if plain[row.quantity] or row.where else ""
                return f"{row.quantity} from step {row.step}{what}"
        first = [row for row in found if row.step == self.first_step]
        parts = [f"{row.quantity} ({row.where}, {row.largest:.1e})" if row.where else row.quantity for row in first]
        return (f"from step {self.first_step}: " if self.first_step else "") + ", ".join(parts)


def require_finite(trace: Trace, processes: int) -> None:
    """Raise UserError where there is nothing to compare."""
    if bad := [step for step, loss in enumerate(trace.loss, 1) if not math.isfinite(loss)]:
        raise UserError(
            f"the loss becomes non-finite at step {bad[0]} with --nproc {processes}: nothing to compare",
            "Lower --lr, add --warmup-epochs or --clip-norm, or use --precision fp32 or bf16.",
        )


def compare(base: Trace, other: Trace, per_step: float) -> Comparison:
    """All quantities of two traces of one config. per_step: the tolerance, 0 for bits."""
    limits = per_step * np.arange(1, len(base.loss) + 1)
    found = [
        exact("ledger", base.ledger, other.ledger),
        exact("images", base.images, other.images),
        numbers("learning rate", base.lr, other.lr, 0 * limits),
        exact("skipped steps", base.skipped, other.skipped),
        numbers("loss", base.loss, other.loss, np.maximum(limits, REPORTED)),
        numbers("gradient norm", base.norm, other.norm, np.maximum(limits, REPORTED)),
        *(tensors(kind, base, other, limits * (_SMALL if kind == "gradients" else 1)) for kind in KINDS),
        replicas(other if other.diverged or base.processes == 1 else base),
    ]
    found.append(metrics(base.metrics or {}, other.metrics or {}, limits[-1] if len(limits) else 0.0))
    return Comparison(other, found)


def exact(quantity: str, base: Sequence[Any], other: Sequence[Any]) -> Row:
    """A value for each step, of any type: the same or not."""
    changed = np.array([[a != b] for a, b in itertools.zip_longest(base, other)], dtype=bool).reshape(-1, 1)
    return _judge(quantity, np.zeros(changed.shape), np.zeros(len(changed)), changed)


def numbers(quantity: str, base: Sequence[Any], other: Sequence[Any], limits: Array) -> Row:
    """A number for each step, or one for each parameter group."""
    a, b = (np.array(values, dtype=np.float64).reshape(len(values), -1) for values in (base, other))
    if a.shape != b.shape:
        return Row(quantity, "different", math.inf, 1)
    return _judge(quantity, _relative(a, b, np.abs(a[np.isfinite(a)]).max(initial=0.0)), limits)


def tensors(quantity: str, base: Trace, other: Trace, limits: Array) -> Row:
    """All tensors of a kind, which is the row's name: some entries of each step, then all entries of the last."""
    part = base.of(quantity)
    names = [base.names[i] for i in part]
    if names != [other.names[i] for i in other.of(quantity)] or len(base.loss) != len(other.loss):
        return Row(quantity, "different", math.inf, 1, "the tensors' names, or how many steps there are")
    if not names:
        return Row(quantity, "none")
    changed = np.array(base.digests)[:, part] != np.array(other.digests)[:, other.of(quantity)]
    row = _judge(quantity, _differences(base, other, part), np.append(limits, limits[-1]), changed, names)
    return replace(row, step=min(row.step, len(limits)))


def replicas(trace: Trace) -> Row:
    """Whether all ranks of one run had the same weights and the same order."""
    if trace.processes == 1:
        return Row("replicas", "none")
    if not trace.diverged:
        return Row("replicas", "equal")
    step, rank, what = min(trace.diverged, key=lambda found: found[0])
    where = f"{what} of rank {rank} and of rank 0"
    return Row("replicas", "different", step=min(step + 1, len(trace.loss)), where=where)


def metrics(base: dict[str, float], other: dict[str, float], tolerance: float) -> Row:
    """The evaluation row; tolerance 0 asks for equality."""
    if base == other:
        return Row("evaluation", "equal" if base else "none")
    loss = _relative(np.array(base["loss"]), np.array(other["loss"]), np.array(abs(base["loss"]))).item()
    flips = max(abs(base[k] - other[k]) for k in ("top1", "top5"))
    allowed = _METRICS + 1 / base["count"] if tolerance else 0.0
    close = base["count"] == other["count"] and flips <= allowed and loss <= tolerance
    both = "; ".join(f"{k} {base[k]:.6g} and {other[k]:.6g}" for k in base if base[k] != other[k])
    return Row("evaluation", "within tolerance" if close else "different", max(loss, flips), where=both)


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


def _differences(base: Trace, other: Trace, part: list[int]) -> Array:
    """Largest relative difference of each tensor: its samples after each step, all at the end: [steps + 1, tensors]."""
    scales = base.kept["scales"].numpy()[:, part].copy()
    floats = [base.kept[f"final/{base.names[i]}"].is_floating_point() for i in part]
    finite = np.where(np.isfinite(scales[:, floats]), scales[:, floats], 0.0)
    scales[:, floats] = np.maximum(scales[:, floats], _FLOOR * finite.max(1, keepdims=True, initial=0.0))
    columns = []
    for name, scale in zip([base.names[i] for i in part], scales.T, strict=True):
        column = []
        for kind, each in (("samples", scale[:-1]), ("final", scale[-1:])):
            a, b = (_real(trace.kept[f"{kind}/{name}"]).reshape(len(each), -1) for trace in (base, other))
            fits = a.shape == b.shape
            column.append(_relative(a, b, each[:, None]).max(1, initial=0.0) if fits else np.full(len(each), math.inf))
        columns.append(np.concatenate(column))
    return np.array(columns).T


def _real(tensor: Tensor) -> Array:
    """Any tensor's entries in float64; a complex one's have two numbers each."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().numpy()
