"""Is a step's update the same on every process, and a moment later?

Where it runs a user's own code (a hook, an optimizer's class), the update is taken twice before it counts, as by each
of two ranks, and put back. After the true one the ranks compare what they hold.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torchs
from torch.utils._pytree import tree_leaves

from lockstep.monitoring import desync
from lockstep.parallel.fsdp import is_part
from lockstep.parallel.hidden_state import digest, put_back
from lockstep.parallel.module_state import driven
from lockstep.training.step_passes import Step, StepPasses

_NUMBERS = ("state", "param_groups", "defaults")  # of an optimizer: no other one is in there


def step_hooks(optimizer: Any) -> tuple[dict[int, Any], ...]:
    """The functions that torch calls around an optimizer's step: its own, and those of all optimizers."""
    # an optimizer that holds another may never have called torch's __init__, which makes these
    before = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    after = getattr(optimizer, "_optimizer_step_post_hooks", {})
    return before, after, torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks


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


def trials(passes: StepPasses, update: Callable[[], object]) -> list[dict[str, Any]]:
    """What each of two ranks holds after the update; nothing of it is left."""
    found = []
    for rank in range(2):
        with _undone(passes.step), passes.by_itself(rank, 2):
            update()
            found.append(held(passes.step))
    return found


def _inner(optimizer: Any, known: dict[int, Any]) -> dict[int, Any]:
    """An optimizer and those that it holds, as one of Lookahead's kind does, by id."""
    if id(optimizer) not in known:
        known[id(optimizer)] = optimizer
        for each in tree_leaves({key: value for key, value in vars(optimizer).items() if key not in _NUMBERS}):
            if isinstance(each, Optimizer):
                _inner(each, known)
    return known


@contextmanager
def _undone(step: Step) -> Iterator[None]:
    """Within, an update may be taken; afterwards all is as before."""
    optimizers = [*_inner(step.optimizer, {}).values()]
    gradients = {p: p.grad for p in step.named.values()}
    states = [{p: dict(each) for p, each in optimizer.state.items()} for optimizer in optimizers]
    groups = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
    attributes = [dict(vars(optimizer)) for optimizer in optimizers]
    inner = [each for state in states for one in state.values() for each in one.values()]
    own = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    tensors = [each for each in (*step.named.values(), *own, *gradients.values(), *inner) if isinstance(each, Tensor)]
    tensors = [*{id(each): each for each in tensors}.values()]
    copies = [each.detach().clone() for each in tensors]
    hooks = [step.hooks.before, step.hooks.after, *([*each.values()] for each in step_hooks(step.optimizer))]
    with put_back({"": step.bare, "optimizer": step.optimizer, "hooks": hooks}, driven(step.bare)):
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
