"""Where and why a part of a batch gives something else than the whole: small experiments on one process.

Some samples of the step pass whole and in parts, with every module's outputs noted. The first module whose outputs
part although its inputs don't is the place; which generators moved while it ran, the loss and its slopes alone, and the
same without backward hooks say why.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.data.loaders import Batch
from lockstep.parallel.given_statistics import GivenStatistics
from lockstep.parallel.hidden_state import HiddenState
from lockstep.parallel.module_state import replaced
from lockstep.rng.draws import current
from lockstep.training.batch_rows import cut
from lockstep.training.outcomes import AGAIN, UNREPEATED, Outcome, with_slopes
from lockstep.training.step_passes import StepPasses

ELSEWHERE = "something else on another process: by rank or id, threads, environment or time"
_NUMPY, _PYTHON, _TORCH = "numpy's generator", "Python's generator", "torch's generator"


@dataclass
class Call:
    """One call of a module in a pass."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    drew: set[str]  # generators from which something was drawn while it ran that is no sample's


def find_cause(check: StepPasses, batch: Batch, start: HiddenState) -> tuple[str, str]:
    """The place and the cause of a difference between samples whole and in parts; empty: none was seen.

    `batch`: of one shard, which passes from the state `start`.
    """
    whole = _Experiment(check, batch, start, slice(None))
    if any(_apart(check, whole, [_Experiment(check, batch, start, slice(None))])[0] for _ in range(AGAIN)):
        return "", UNREPEATED
    if not whole.calls:
        return "the model", "torch.jit compiled it, whose random numbers and batch statistics are out of reach"
    for single in (False, True):  # cut as a check does it
        rows = [slice(*ends) for ends in cut(0, batch.shards[0].size, check.group(), 2 + single, single)]
        if len(rows) == 1:
            continue
        parts = [_Experiment(check, batch, start, each, whole.statistics) for each in rows]
        if call := _parting(check, whole, parts):
            return call.name or "the model", _why(check, call)
        gradients, loss = _apart(check, whole, parts)
        slopes = ((slope, [part.slopes.get(k, slope[:0]) for part in parts]) for k, slope in whole.slopes.items())
        if loss or (gradients and any(_differs(check, slope, *others) for slope, others in slopes)):
            return "the loss", _draws(whole.drew) or "that of a batch is not the mean over its samples'"
        if gradients:
            return _in_backward(check, batch, start, rows)
    return "", ""


def _in_backward(check: StepPasses, batch: Batch, start: HiddenState, rows: list[slice]) -> tuple[str, str]:
    """Where outputs agree and gradients don't: the same without backward hooks."""
    hooked = [name for name, m in _modules(check.bare) if m._backward_hooks or m._backward_pre_hooks]
    whole = _Experiment(check, batch, start, slice(None), hooks=False)
    parts = [_Experiment(check, batch, start, each, whole.statistics, hooks=False) for each in rows]
    if hooked and not _apart(check, whole, parts)[0]:
        return hooked[0], "a backward hook on it looks at the gradients of all samples that pass together"
    return "", "something in the backward pass, or a loss or detach() in forward, sees all samples that pass together"


class _Experiment:
    """A pass of some rows of a shard, with every module's calls.

    Args:
        statistics: of a pass of the whole, for batch norms; without them this one is the whole.
        hooks: whether backward hooks of modules are called.
    """

    def __init__(
        self,
        check: StepPasses,
        batch: Batch,
        start: HiddenState,
        rows: slice,
        statistics: GivenStatistics | None = None,
        hooks: bool = True,
    ) -> None:
        step, model, shard = check.step, check.bare, batch.shards[0]
        self.calls: list[Call] = []
        self.slopes: dict[int, Tensor] = {}  # of the loss, by which of its inputs
        self.drew: set[str] = set()  # as a call's, by the loss
        self.statistics = GivenStatistics(model) if statistics is None else statistics
        first, stop, _ = rows.indices(shard.size)
        part = replace(shard, rows=slice(shard.rows.start + first, shard.rows.start + stop))
        loss = step.loss

        def noting(outputs: Any, labels: Tensor) -> Any:
            before = _generators()
            value = loss(with_slopes(outputs, len(labels), self.slopes.__setitem__), labels)
            self.drew |= _moved(before)
            return value

        start.restore()
        with ExitStack() as stack:
            stack.enter_context(check.by_itself())
            stack.enter_context(replaced(step, loss=noting))
            for name, module in _modules(model):
                before: list[Any] = []
                for handle in (
                    module.register_forward_pre_hook(lambda *_, before=before: before.append(_generators())),
                    module.register_forward_hook(partial(_note, self.calls, name, before)),
                ):
                    stack.callback(handle.remove)
                if not hooks:
                    none: dict[str, Any] = {name: OrderedDict() for name in ("_backward_hooks", "_backward_pre_hooks")}
                    stack.enter_context(replaced(module, **none))
            if statistics is None:
                self.statistics.begin()
            stack.enter_context(self.statistics.noted() if statistics is None else self.statistics.given(0))
            some = replace(batch, images=batch.images[rows], labels=batch.labels[rows], shards=(part,))
            losses = step.take_passes(some)
        self.outcome = Outcome(step.take_gradients(), check.loss(losses, (part,), everywhere=False), start)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that take hooks, which what torch.jit compiled doesn't."""
    return [(name, m) for name, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)]


def _note(calls: list[Call], name: str, before: list[Any], module: nn.Module, args: Any, output: Any) -> None:
    del module
    calls.append(Call(name, _copies(args), _copies(output), _moved(before.pop())))


def _moved(before: dict[str, Any]) -> set[str]:
    """The generators that have moved since."""
    return {key for key, state in _generators().items() if state != before[key]}


def _generators() -> dict[str, Any]:
    numpys: Any = np.random.get_state(legacy=False)
    # not torch.get_rng_state: in a shard's passes it is also the shard's own generator, which keyed draws move
    return {
        _TORCH: (torch.default_generator.get_state().numpy().tobytes(), getattr(current(), "unkeyed", 0)),
        _NUMPY: (numpys["state"]["pos"], numpys["state"]["key"].tobytes()),
        _PYTHON: random.getstate(),
    }


def _copies(value: Any) -> list[Tensor]:
    """The floating-point tensors in it; copies, since the next module may work in place."""
    return [t.detach().clone() for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]


def _parting(check: StepPasses, whole: _Experiment, parts: Sequence[_Experiment]) -> Call | None:
    """The first call whose outputs part though its inputs don't, or whose outputs part at all."""
    first: Call | None = None
    for number, call in enumerate(whole.calls):
        others = [part.calls[number] for part in parts if number < len(part.calls)]
        if any(other.name != call.name for other in others):
            break
        outputs = zip(call.outputs, *(other.outputs for other in others), strict=False)
        if any(_differs(check, *each) for each in outputs):
            inputs = zip(call.inputs, *(other.inputs for other in others), strict=False)
            if not any(_differs(check, *each) for each in inputs):
                return call
            first = first or call
    return first


def _differs(check: StepPasses, whole: Tensor, *parts: Tensor) -> bool:
    """Whether parts, put together along the dimension that holds the samples, differ from the whole."""
    if all(part.shape == whole.shape for part in parts):
        return any(_far(check, whole, part) for part in parts)
    for dim in range(whole.ndim):
        if sum(part.shape[dim] if part.ndim > dim else 0 for part in parts) == whole.shape[dim]:
            joined = torch.cat(list(parts), dim) if all(part.ndim == whole.ndim for part in parts) else whole[:0]
            if joined.shape == whole.shape:
                return _far(check, whole, joined)
    return False


def _far(check: StepPasses, a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    apart = torch.where((a == b) | ((a != a) & (b != b)), 0.0, a - b)
    return not float(apart.norm()) <= 10 * check.limit * float(a.nan_to_num().norm())  # of NaN in one alone too


def _apart(check: StepPasses, whole: _Experiment, parts: Sequence[_Experiment]) -> tuple[bool, bool]:
    """Whether gradients, and the loss, differ from the sums of the parts'; theirs are used up."""
    size, of_loss = check.apart(whole.outcome, reduce(add, [part.outcome for part in parts]))
    return float(size.max()) > 10 * check.limit, of_loss > 10 * check.limit


def _draws(drew: set[str]) -> str:
    return f"it draws from {', '.join(sorted(drew))} by a function whose draws are not keyed by sample" if drew else ""


def _why(check: StepPasses, call: Call) -> str:
    if call.drew:
        return _draws(call.drew)
    if "norm" in type(check.bare.get_submodule(call.name)).__name__.lower():
        return "it takes statistics over the samples that pass together"
    return "what it computes for a sample depends on which others pass with it"
