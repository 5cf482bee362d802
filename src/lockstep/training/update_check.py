"""Is a step's update the same on every process, and a moment later?

Where it runs a user's own code (a hook, an optimizer's class), the update is taken twice before it counts, as by each
of two ranks, and put back. After the true one the ranks compare what they hold.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import optimizer as torchs

from lockstep.monitoring import desync
from lockstep.parallel.data_parallel import driven
from lockstep.parallel.fsdp import is_part
from lockstep.parallel.hidden_state import digest, put_back
from lockstep.training.outcomes import Step, StepPasses


def step_hooks(optimizer: Any) -> tuple[dict[int, Any], ...]:
    """The functions that torch calls around an optimizer's step: its own, and those of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return *own, torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks


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


@contextmanager
def _undone(step: Step) -> Iterator[None]:
    """Within, an update may be taken; afterwards all is as before."""
    optimizer: Any = step.optimizer
    tensors = [p.detach() for p in step.named.values()]
    gradients = {p: p.grad for p in step.named.values()}
    state = {p: dict(each) for p, each in optimizer.state.items()}
    inner = [each for one in state.values() for each in one.values() if isinstance(each, Tensor)]
    tensors += [*filter(lambda each: each is not None, gradients.values()), *inner]  # type: ignore[list-item]
    copies = [each.clone() for each in tensors]
    groups, attributes = [dict(group) for group in optimizer.param_groups], dict(vars(optimizer))
    roots = {"": step.bare, "optimizer": optimizer, "hooks": [step.hooks.before, step.hooks.after]}
    with put_back(roots | {"step hooks": [[*hooks.values()] for hooks in step_hooks(optimizer)]}, driven(step.bare)):
        try:
            yield
        finally:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.data.copy_(copy)
            for p, gradient in gradients.items():
                p.grad = gradient
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
