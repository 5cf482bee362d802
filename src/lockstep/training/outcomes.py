"""What came of a step's passes, and how far two tensors of that kind are apart."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.parallel.fsdp import local
from lockstep.parallel.hidden_state import HiddenState
from lockstep.parallel.module_state import unequal

_ROW = 4096  # elements whose squares float32 adds up without a loss that matters
# the first is said: a pass fails, bits in exact mode, ...; before gradients, state that each process moves by itself,
# which shows on one process as well, where gradients are those of the whole batch
KINDS = ("pass", "batch", "bits", "types", "generator", "state", "gradient", "loss", "buffer", "update", "evaluation")
AGAIN = 8  # passes: what is decided by a coin comes to the same in one of two, and then another cause is named
UNREPEATED = "the same pass gives something else the second time: what moves is out of reach (a file, a clock, ...)"
HELD = "a generator that the model holds, whose draws are not keyed by sample"


@dataclass(frozen=True)
class Finding:
    """What differs with the number of processes."""

    step: int  # from 0, as a batch has it; sentences and records count from 1
    what: str  # one of KINDS
    place: str  # the name of a parameter, buffer or attribute
    size: float  # the relative difference
    cause: str = ""
    placed: bool = False  # by an experiment, in a module or the loss, and so no rounding

    @property
    def note(self) -> str:
        """The same as a line of the command's."""
        return f"note: {self.message}. --law off looks no more, --law strict ends the run"

    @property
    def message(self) -> str:
        """A sentence for the user."""
        step, differ = self.step + 1, "weights will differ with the number of processes"
        if self.what == "evaluation":
            return (
                "metrics will differ with the number of processes: a batch of the evaluation follows what the one "
                f"before it has left in {self.place}, and another process takes other ones"
            )
        if self.what == "pass":
            hint = "what forward or the loss needs of a batch has to come with it"
            return f"other numbers of processes can't be compared, as a part of a batch fails: {self.cause} ({hint})"
        if self.what == "bits":
            return f"exact mode: {self.cause} ({self.place} has other bits at step {step})"
        if self.what in ("update", "batch", "types"):
            return f"{differ}: at step {step} {self.cause} {self.place}"
        if self.what == "generator":
            return f"{differ}: {self.place} ({self.cause}, step {step})"
        size = f"{self.size:.1%} away" if 1e-3 <= self.size < 10 else f"{self.size:.1g} away"
        size = size if math.isfinite(self.size) else "not finite there"
        what = {"loss": "the loss", "state": self.place}.get(self.what, f"the {self.what} of {self.place}")
        cause = f"; {self.cause}" if self.cause else ""
        return f"{differ}: at step {step} {what} is {size}{cause}"


@dataclass
class Outcome:
    """What came of a step's passes."""

    gradients: list[Tensor | None]  # of the parameters in their order
    loss: Tensor  # float64 [2]: the sum over the batch, and what it is divided by
    state: HiddenState

    @cached_property
    def norms(self) -> Tensor:
        """Of the gradients."""
        return norms_of(self.gradients)

    def __add__(self, more: "Outcome") -> "Outcome":
        """Of the passes of both; those gradients of `more` are used up."""
        pairs = zip(self.gradients, more.gradients, strict=True)
        gradients = [b if a is None else a.clone() if b is None else b.add_(a) for a, b in pairs]
        return Outcome(gradients, self.loss + more.loss, self.state)


def norms_of(gradients: Iterable[Tensor | None]) -> Tensor:
    """float64 [parameters] on the host; of sharded ones over all ranks."""
    squares, sharded = list[float](), False
    for gradient in gradients:
        own = None if gradient is None else local(gradient)
        sharded |= own is not gradient
        squares.append(0.0 if own is None else _norm(own) ** 2)
    found = torch.tensor(squares, dtype=torch.float64)
    if sharded:
        dist.all_reduce(found)
    return found.sqrt()


def minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a - b, at float32 least, of gradients, of which there may be none; of FSDP's parts a part."""
    if a is None or b is None:
        return b if a is None else a
    a, b = (each.to_dense() if each.is_sparse else each for each in (a, b))
    a, b = (each.float() if each.dtype in (torch.float16, torch.bfloat16) else each for each in (a, b))
    return a - b  # of float32 in float64 it takes five times as long, for a digit that no limit asks for


def _norm(gradient: Tensor) -> float:
    gradient = gradient.detach()
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    rows = gradient.numel() // _ROW * _ROW
    if gradient.dtype == torch.float32 and rows:  # in float64 it takes ten times as long
        flat = gradient.reshape(-1)
        norm = float(torch.linalg.vector_norm(flat[:rows].view(-1, _ROW), dim=1).double().norm())
        if 1e-15 < norm < 1e15:  # so that squares are numbers of float32 as well
            return math.hypot(norm, _norm(flat[rows:]))
    return float(torch.linalg.vector_norm(gradient, dtype=torch.complex128 if gradient.is_complex() else torch.float64))


def moved_apart(start: Tensor, here: Tensor, there: Tensor) -> float:
    """How far two values of a buffer are apart, as a part of how far it went."""
    if here.shape != there.shape or here.dtype != there.dtype:
        return math.inf
    here, there, start = here.double(), there.double(), start.double() if start.shape == here.shape else here * 0
    apart = torch.where(unequal(here, there), here - there, 0.0).norm()
    went = torch.where(unequal(here, start), here - start, 0.0).norm()
    return float(apart / went.clamp(min=1e-6 * float(here.norm()) or 1e-300)) if apart else 0.0


def following(outputs: Any, count: int) -> list[Tensor]:
    """The outputs that follow samples, and bring back slopes."""
    found = {id(leaf): leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad}
    return [leaf for leaf in found.values() if leaf.ndim and len(leaf) == count]


def with_slopes(outputs: Any, count: int, note: Callable[[int, Tensor], object]) -> Any:
    """The outputs for a loss, whose gradients backward gives to `note` with the number of each that follows samples.

    They are views: an output may be computed from another one, and the hook would see what comes by that way too.
    """
    views = {id(leaf): leaf.view_as(leaf) for leaf in following(outputs, count)}
    for k, view in enumerate(views.values()):
        # after the hooks that the loss may have on it
        view.grad_fn.register_prehook(lambda slopes, k=k: note(k, slopes[0]))  # type: ignore[union-attr]
    return tree_map(lambda leaf: views.get(id(leaf), leaf), outputs)
