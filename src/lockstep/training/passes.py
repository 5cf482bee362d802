"""What came of forward and backward passes over five samples, whole and cut, and where it is not the same."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

WHOLE, FIRST, SECOND = (0, 1, 2, 3, 4), (0, 2, 4), (1, 3)
_TOLERANCE = 1e-6  # of a tensor's largest entry: above what a layer that computes in float32 rounds
ROUNDING = 1e-6  # of the largest gradient; one below may be what is left of a sum that is 0, as of a bias before a norm

Call = tuple[str, list[Tensor], list[Tensor]]  # a module's name, its inputs and its outputs


@dataclass
class Pass:
    """What came of one forward and backward pass."""

    calls: list[Call] = field(default_factory=list)
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def mean(parts: Sequence[Tensor]) -> Tensor:
    """Of the ranks' buffers, each by its samples; others than floats are rank 0's."""
    first, second = parts
    if not first.is_floating_point():
        return first
    return torch.where(first == second, first, (first * len(FIRST) + second * len(SECOND)) / len(WHOLE))


def place(whole: Pass, parts: Sequence[Pass]) -> str:
    """The first module whose outputs differ though its inputs don't, or whose outputs differ at all."""
    first: str = ""
    for name, inputs, outputs, *others in _aligned(whole, parts):
        if differ(outputs, [each[1] for each in others]):
            if not differ(inputs, [each[0] for each in others]):
                return str(name)
            first = first or name
    return first


def _aligned(whole: Pass, parts: Sequence[Pass]) -> Iterator[Any]:
    """(module, inputs, outputs, (inputs, outputs) of each part) for each call, as long as the calls are the same."""
    for (name, inputs, outputs), *others in zip(whole.calls, *(part.calls for part in parts), strict=False):
        if any(other[0] != name for other in others):
            return
        yield name, inputs, outputs, *[other[1:] for other in others]


def differ(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> bool:
    """Whether any tensor of a pass differs from what the parts have in its place, put together."""
    return any(_joined_differ(*each) for each in zip(whole, *parts, strict=False))


def _joined_differ(whole: Tensor, *parts: Tensor) -> bool:
    """Whether parts, put together by samples, differ from the whole. What can't be put together is not compared."""
    if all(part.shape == whole.shape for part in parts):
        return any(apart(whole, part) for part in parts)
    first, second = parts
    for dim, (n, a, b) in enumerate(zip(whole.shape, first.shape, second.shape, strict=False)):
        fold = n // len(WHOLE)
        if fold and (n, a, b) == (len(WHOLE) * fold, len(FIRST) * fold, len(SECOND) * fold):
            rows = whole.movedim(dim, 0)
            rows = rows.reshape(len(WHOLE), fold, *rows.shape[1:])
            pairs = ((FIRST, first), (SECOND, second))
            return any(apart(rows[list(at)].flatten(0, 1), part.movedim(dim, 0)) for at, part in pairs)
    return False


def largest(tensors: Iterable[Tensor]) -> float:
    """The largest finite entry of them all, without its sign."""
    return max((float(torch.where(torch.isfinite(t), t, 0).abs().max()) for t in tensors if t.numel()), default=0.0)


def apart(a: Tensor, b: Tensor, least: float = 0.0) -> bool:
    """Whether two tensors differ by more than rounding; what is not finite in both is the same.

    `least`: of numbers that are smaller, only what differs by more than these may round counts.
    """
    if a.shape != b.shape:
        return True
    if not a.is_floating_point():
        return not torch.equal(a, b)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return True
    return bool((torch.where(finite, a - b, 0).abs() > _TOLERANCE * max(largest([a]), least)).any())
