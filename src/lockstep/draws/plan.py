"""Where the batch is in the shapes that a model draws random numbers of: found by two small forward passes.

A call whose shape is the same for 3 samples and for 5 has no batch dimension. Where one dimension is 3 f and 5 f, it
holds the samples, f rows of each one after the other, as the windows of an image. Guessing by "the dimension that is as
long as the batch" would take swin's heads for samples as soon as there are as many.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PASSES = 3, 5  # samples; no multiple of one another, and rarely a model's own sizes

Call = tuple[str, tuple[int, ...]]  # what was drawn, of which shape


@dataclass(frozen=True)
class Layout:
    """The dimension that holds the samples, and how many rows of it belong to each."""

    dim: int
    fold: int


@dataclass(frozen=True)
class Entry:
    """One call of a forward pass."""

    kind: str
    shape: tuple[int, ...]  # for one sample
    layout: Layout | None  # None: no batch dimension

    def fits(self, kind: str, shape: Sequence[int], samples: int) -> bool:
        """Whether a call in a pass of so many samples may be this one."""
        mine = list(self.shape)
        if self.layout is not None:
            mine[self.layout.dim] *= samples
        return self.kind == kind and mine == list(shape)


class Plan:
    """The calls of a forward pass, in their order.

    Args:
        first: the calls of a pass over PASSES[0] samples.
        second: those of one over PASSES[1].
    """

    def __init__(self, first: Sequence[Call], second: Sequence[Call]) -> None:
        same = [kind for kind, _ in first] == [kind for kind, _ in second]
        self.entries = [_entry(*pair) for pair in zip(first, second, strict=True)] if same else []

    def find(self, number: int, kind: str, shape: Sequence[int], samples: int) -> Entry | None:
        """The entry of call `number` of a pass over `samples`, or one that all calls of such a shape agree with.

        None where nothing is known of it: another number of calls in each pass, or a shape that follows no batch.
        """
        if number < len(self.entries):
            entry = self.entries[number]
            if entry is not None and entry.fits(kind, shape, samples):
                return entry
        fitting = [entry for entry in self.entries if entry is not None and entry.fits(kind, shape, samples)]
        return fitting[0] if len({entry.layout for entry in fitting}) == 1 else None


def _entry(first: Call, second: Call) -> Entry | None:
    (kind, small), (_, large) = first, second
    if len(small) != len(large):
        return None
    differing = [dim for dim, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    if not differing:
        return Entry(kind, small, None)
    dim = differing[0]
    fold, rest = divmod(small[dim], PASSES[0])
    if len(differing) > 1 or rest or large[dim] != fold * PASSES[1]:
        return None
    return Entry(kind, (*small[:dim], fold, *small[dim + 1 :]), Layout(dim, fold))


def guess(shape: Sequence[int], samples: int) -> Layout | None:
    """What is done about a call that the plan does not know: the first dimension, if the batch divides it, or none."""
    if shape and shape[0] and shape[0] % samples == 0:
        return Layout(0, shape[0] // samples)
    return None
