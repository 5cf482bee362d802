"""One quantity of two traces: equal, within tolerance or different, by how much, and where it begins.

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

from lockstep.commands.verify.trace import Trace

Verdict = Literal["equal", "within tolerance", "different", "none"]

_FLOOR = 1e-3
_METRICS = 1e-3  # top-1 and top-5 in plain mode, besides one image: near-ties fall either way

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
    return Row(
        "replicas", "different", step=min(step + 1, len(trace.loss)), where=f"{what} of rank {rank} and of rank 0"
    )


def shares(base: Trace, other: Trace) -> Row:
    """Whether the ranks' pieces took each sample of a batch once, and in exact mode were the same ones."""
    for trace in (base, other):
        if trace.uncovered:
            where = f"samples are missed or taken twice with N = {trace.processes}"
            return Row("shares", "different", step=trace.uncovered[0] + 1, where=where)
    cuts = [[sorted(size for rank in step for size in rank) for step in trace.shares] for trace in (base, other)]
    differing = [step for step, (a, b) in enumerate(zip(*cuts, strict=False), 1) if a != b]
    if base.exact and differing:
        return Row("shares", "different", step=differing[0], where="the pieces of a batch depend on N")
    return Row("shares", "equal")


def written(base: Trace, other: Trace, explained: bool, bits: bool) -> Row:
    """What `train` would leave: the digest in its `end` record and the file of the final weights.

    Args:
        explained: the tensors that were followed differ as well.
        bits: the mode asks for the same ones.
    """
    pairs = {
        "weights_sha256": base.weights_sha256 == other.weights_sha256,
        "final.safetensors": base.file_sha256 == other.file_sha256,
    }
    if all(pairs.values()):
        return Row("written", "equal")
    verdict: Verdict = "within tolerance" if explained and not bits else "different"
    return Row("written", verdict, where=" and ".join(name for name, same in pairs.items() if not same))


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


def _floored(base: Trace, part: list[int]) -> Array:
    """The tensors' magnitudes [steps + 1, tensors], not below a part of the largest floating one."""
    out = base.kept["scales"].numpy()[:, part].copy()
    floats = [base.kept[f"final/{base.names[i]}"].is_floating_point() for i in part]
    finite = np.where(np.isfinite(out[:, floats]), out[:, floats], 0.0)
    out[:, floats] = np.maximum(out[:, floats], _FLOOR * finite.max(1, keepdims=True, initial=0.0))
    return out


def _differences(base: Trace, other: Trace, part: list[int]) -> Array:
    """Largest relative difference of each tensor: its samples after each step, all at the end: [steps + 1, tensors]."""
    columns = []
    for name, scales in zip([base.names[i] for i in part], _floored(base, part).T, strict=True):
        column = []
        for kind, scale in (("samples", scales[:-1]), ("final", scales[-1:])):
            a, b = (_real(trace.kept[f"{kind}/{name}"]).reshape(len(scale), -1) for trace in (base, other))
            fits = a.shape == b.shape
            column.append(
                _relative(a, b, scale[:, None]).max(1, initial=0.0) if fits else np.full(len(scale), math.inf)
            )
        columns.append(np.concatenate(column))
    return np.array(columns).T


def _real(tensor: Tensor) -> Array:
    """Any tensor's entries in float64; a complex one's have two numbers each."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().numpy()
