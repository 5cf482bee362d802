"""Two traces side by side: each quantity equal, within tolerance or different, by how much, and where it begins.

Differences are relative to the largest magnitude of the tensor (or of the whole trajectory). A tensor far smaller than
the model's largest one is measured against a thousandth of that: a bias in front of batch norm holds only rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lockstep.commands.verify.trace import Trace

Verdict = Literal["equal", "within tolerance", "different", "none"]

PER_STEP = {"fp32": 4e-6, "tf32": 5e-4, "bf16": 4e-3, "fp16": 5e-4}
"""Relative difference that plain mode grants a step: half a unit in the last place of the type in which factors are
rounded; for fp32, where the sums' own rounding counts, 32 units."""
REPORTED = 1e-12  # of float64 sums that are made for the trace alone, and so are added over ranks as they come
_FLOOR = 1e-3
_METRICS = 1e-3  # top-1 and top-5 in plain mode, besides one image: near-ties fall either way

RESULTS = ("loss", "gradient norm", "weights", "buffers")
MATHS = ("images", "learning rate", *RESULTS)  # what a re-run can tell something about

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Row:
    """What was found for one quantity."""

    quantity: str
    verdict: Verdict
    largest: float = 0.0  # relative difference
    step: int = 0  # the first one beyond tolerance (of any difference, where all are within), from 1; 0: not by step
    where: str = ""  # tensor, or in words

    @property
    def holds(self) -> bool:
        """True where the mode's claim holds for this quantity."""
        return self.verdict != "different"

    @property
    def detail(self) -> str:
        """Largest difference, first step and tensor, in a few words."""
        first = f"from step {self.step}" if self.step else ""
        size = f"{self.largest:.1e}" if self.largest else ""
        return ", ".join(part for part in (size, first, self.where) if part)


def compare(base: Trace, other: Trace, per_step: float) -> list[Row]:
    """All quantities of two traces of one config. per_step: the tolerance, 0 for bits."""
    repeated = " and ".join(f"N = {trace.processes}" for trace in (base, other) if trace.repeats)
    note = f"epoch 2 repeats epoch 1 ({repeated})" if repeated else ""
    rows = [
        replace(_by_step("ledger", base.ledger, other.ledger), where=note),
        _by_step("images", base.images, other.images),
        _numbers("learning rate", base.lr, other.lr, 0.0),
        _numbers("loss", base.loss, other.loss, per_step),
        _numbers("gradient norm", base.norm, other.norm, per_step),
        _state("weights", base, other, per_step, slice(0, base.parameters)),
        _state("buffers", base, other, per_step, slice(base.parameters, None)),
        _replicas(other),
    ]
    if base.metrics is not None and other.metrics is not None:
        rows.append(metrics(base.metrics, other.metrics, per_step * len(base.loss)))
    return rows


def largest(rows: Sequence[Row]) -> float:
    """The largest difference of the results; inf where one became non-finite."""
    return max((row.largest for row in rows if row.quantity in RESULTS), default=0.0)


def first_step(rows: Sequence[Row]) -> int:
    """The first step at which any of them differs; 0 for none."""
    return min((row.step for row in rows if row.quantity in MATHS and not row.holds and row.step), default=0)


def metrics(base: dict[str, float], other: dict[str, float], tolerance: float) -> Row:
    """The evaluation row; tolerance 0 asks for equality."""
    if base == other:
        return Row("evaluation", "equal")
    loss = _relative(np.array([base["loss"]]), np.array([other["loss"]]), np.array([abs(base["loss"])])).item()
    flips = max(abs(base[k] - other[k]) for k in ("top1", "top5"))
    allowed = _METRICS + 1 / base["count"] if tolerance else 0.0
    close = base["count"] == other["count"] and flips <= allowed and loss <= tolerance
    shown = "; ".join(f"{k} {base[k]:.6g} and {other[k]:.6g}" for k in base if base[k] != other[k])
    return Row("evaluation", "within tolerance" if close else "different", max(loss, flips), where=shown)


def _by_step(quantity: str, base: Sequence[Any], other: Sequence[Any]) -> Row:
    if base == other:
        return Row(quantity, "equal")
    pairs = enumerate(zip(base, other, strict=False), 1)
    first = next((step for step, (a, b) in pairs if a != b), min(len(base), len(other)) + 1)
    return Row(quantity, "different", step=first)


def _relative(a: Array, b: Array, scale: Array) -> Array:
    """|a - b| / scale; 0 where both are the same (both nan too), inf where one is not finite or the scale is 0."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = np.abs(a - b) / scale
    return np.where(same, 0.0, np.where(np.isfinite(difference), difference, math.inf))


def _numbers(quantity: str, base: Sequence[Any], other: Sequence[Any], per_step: float) -> Row:
    a, b = np.array(base, dtype=np.float64), np.array(other, dtype=np.float64)
    if a.shape != b.shape:
        return Row(quantity, "different", math.inf, 1)
    if np.array_equal(a, b, equal_nan=True):
        return Row(quantity, "equal")
    scale = np.abs(a[np.isfinite(a)]).max(initial=0.0)
    by_step = _relative(a, b, np.full_like(a, scale)).reshape(len(a), -1).max(1)
    limits = np.maximum(per_step * np.arange(1, len(a) + 1), 0.0 if quantity == "learning rate" else REPORTED)
    over = by_step > limits
    found = over if over.any() else by_step > 0
    verdict: Verdict = "different" if over.any() else "within tolerance"
    return Row(quantity, verdict, by_step.max().item(), int(np.argmax(found)) + 1)


def _state(quantity: str, base: Trace, other: Trace, per_step: float, part: slice) -> Row:
    """Weights or buffers: the samples of each step, then all entries of the last."""
    names = base.names[part]
    if not names:
        return Row(quantity, "none")
    if base.names != other.names:
        return Row(quantity, "different", math.inf, 1, "the tensors' names")
    steps = len(base.digests)
    final = _final(base, other)[part]
    by_step = _sampled(base, other)[:, part] if steps else np.zeros((0, len(names)))
    changed = np.array([[x != y for x, y in zip(a[part], b[part], strict=True)] for a, b in _zip_digests(base, other)])
    limits = per_step * np.arange(1, steps + 1)[:, None]
    over = by_step > limits if per_step else changed
    late = final > per_step * max(steps, 1)
    if not (over.any() or late.any()):
        seen = by_step > 0
        if not (changed.any() or final.any()):
            return Row(quantity, "equal")
        verdict: Verdict = "within tolerance"
    else:
        seen, verdict = over, "different"
    peak = np.maximum(by_step.max(0, initial=0.0), final)
    if seen.any():
        step = int(np.argmax(seen.any(1)))
        candidates = np.where(seen[step], by_step[step], -1.0)
        return Row(quantity, verdict, peak.max().item(), step + 1, names[int(np.argmax(candidates))])
    return Row(quantity, verdict, peak.max().item(), steps, names[int(np.argmax(final))])


def _zip_digests(base: Trace, other: Trace) -> Any:
    return zip(base.digests, other.digests, strict=False)


def _floored(base: Trace, magnitudes: Array) -> Array:
    """The tensors' magnitudes [..., tensors], not below a part of the largest floating-point one of their kind."""
    out = magnitudes.copy()
    floats = np.array([base.kept[f"final/{name}"].is_floating_point() for name in base.names], dtype=bool)
    kind = np.arange(len(floats)) < base.parameters
    for group in (floats & kind, floats & ~kind):
        highest = magnitudes[..., group].max(-1, keepdims=True, initial=0.0)
        out[..., group] = np.maximum(magnitudes[..., group], _FLOOR * highest)
    return out


def _sampled(base: Trace, other: Trace) -> Array:
    """Largest relative difference of each tensor's sampled entries after each step: [steps, tensors]."""
    steps = min(len(base.samples), len(other.samples))
    scales = _floored(base, base.scales[:steps])
    counts = np.diff([*base.starts, base.samples.shape[1]])
    by_entry = _relative(base.samples[:steps], other.samples[:steps], np.repeat(scales, counts, axis=1))
    columns = np.where(counts > 0)[0]
    out = np.zeros((steps, len(counts)))
    out[:, columns] = np.maximum.reduceat(by_entry, np.array(base.starts)[columns], axis=1)
    return out


def _final(base: Trace, other: Trace) -> Array:
    """The same over all entries at the end: [tensors]."""
    pairs = [[trace.kept[f"final/{name}"].double().numpy() for trace in (base, other)] for name in base.names]
    scales = _floored(base, np.array([np.abs(a).max(initial=0.0) for a, _ in pairs]))
    return np.array(
        [_relative(a, b, np.full_like(a, s)).max(initial=0.0) for (a, b), s in zip(pairs, scales, strict=True)]
    )


def _replicas(trace: Trace) -> Row:
    """Whether all ranks of one run had the same weights and the same order."""
    if trace.processes == 1:
        return Row("replicas", "none")
    if not trace.strangers:
        return Row("replicas", "equal")
    step, rank, what = min(trace.strangers)
    return Row("replicas", "different", step=step + 1, where=f"{what} of rank {rank} and of rank 0")
