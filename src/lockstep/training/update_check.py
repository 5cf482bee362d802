"""Is a step's update the same on every process, and a moment later?

Where it runs a user's own code (a hook, an optimizer's class), the update is taken twice before it counts, as by each
of two ranks, and put back. After the true one the ranks compare what they hold.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lockstep.checkpoint.carried import with_inner
from lockstep.monitoring import desync
from lockstep.parallel.fsdp import is_part
from lockstep.parallel.hidden_state import HiddenState, digest, put_back
from lockstep.parallel.module_state import driven
from lockstep.parallel.parameter_hooks import hooks_around
from lockstep.training.step_passes import Step, StepPasses


def held(step: Step) -> dict[str, Any]:
    """Digests of what an update moves: numbers of the parameter groups first, then parameters."""
    values: dict[str, Any] = {
        f"{key} of parameter group {g}": value
        for g, group in enumerate(step.optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, Tensor | int | float)
    }
    values |= {name: p for name, p in step.named.items() if not is_part(p)}
    return {
        name: int(desync.digest(v)) if isinstance(v, Tensor) and v.device.type != "cpu" else digest(v)
        for name, v in values.items()
    }


def trials(
    passes: StepPasses, update: Callable[[], object], states: Sequence[HiddenState] = ()
) -> list[dict[str, Any]]:
    """What each of two ranks holds after the update, or what comes of it from two states; nothing of it is left."""
    found, here = list[dict[str, Any]](), states[0].values if states else {}
    buffers = {name for name, _ in passes.bare.named_buffers()} & here.keys()
    for number in range(2):
        with _undone(passes.step), passes.by_itself(0 if states else number, 2):
            if states:
                states[number].restore()
                for name in buffers:
                    states[number].give(name, here[name])
            update()
            found.append(held(passes.step))
    for state in states[:1]:
        state.restore()
    return found


@contextmanager
def _undone(step: Step) -> Iterator[None]:
    """Within, an update may be taken; afterwards all is as before."""
    optimizers = with_inner(step.optimizer)
    gradients = {p: p.grad for p in step.named.values()}
    states = [{p: dict(each) for p, each in optimizer.state.items()} for optimizer in optimizers]
    groups = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
    attributes = [dict(vars(optimizer)) for optimizer in optimizers]
    inner = [each for state in states for one in state.values() for each in one.values()]
    own = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    tensors = [each for each in (*step.named.values(), *own, *gradients.values(), *inner) if isinstance(each, Tensor)]
    tensors = [*{id(each): each for each in tensors}.values()]
    copies = [each.detach().clone() for each in tensors]
    entries = [*(one for state in states for one in state.values()), *(group for each in groups for group in each)]
    others = [value for entry in entries for value in entry.values() if not isinstance(value, Tensor)]
    roots = {"": step.bare, "optimizer": step.optimizer, "state": others}
    roots |= hooks_around(step.bare, step.optimizer)
    with put_back(roots, driven(step.bare)):
        try:
            yield
        finally:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.data.copy_(copy)
            for p, gradient in gradients.items():
                p.grad = gradient
            for optimizer, state, before, kept in zip(optimizers, states, groups, attributes, strict=True):
                vars(optimizer).clear()
                vars(optimizer).update(kept)
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, old in zip(optimizer.param_groups, before, strict=True):
                    group.clear()
                    group.update(old)
