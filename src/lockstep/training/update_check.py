"""Is a step's update the same on every process, and a moment later?

Where it runs a user's own code (a hook, an optimizer's class), the update is taken before it counts, as by each of two
ranks and by a process alone, and put back. After the true one the ranks compare what they hold.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.checkpoint.carried import with_inner
from lockstep.monitoring import desync
from lockstep.parallel.determinism import Collectives
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


def trials(passes: StepPasses, update: Callable[[], object]) -> list[dict[str, Any]]:
    """What each of two ranks holds after the update, and a process alone, if the update asks no other rank; nothing of
    it is left."""
    found, collectives = list[dict[str, Any]](), Collectives()
    for rank, ranks in ((0, 2), (1, 2), (0, 0)):
        if collectives.called and not ranks:
            break
        with _undone(passes.step), passes.by_itself(rank, ranks):
            try:
                with collectives:
                    update()
            except ValueError as error:
                if ranks or "process group" not in str(error):
                    raise
                break  # it asks for a rank where there is none
            found.append(held(passes.step))
    return found


def follows(passes: StepPasses, update: Callable[[], object], here: HiddenState, there: HiddenState) -> bool:
    """Whether the update comes to something else from one state than from the other, whose buffers are the same;
    nothing of it is left, and the model is in the first."""
    found, buffers = [], {name for name, _ in passes.bare.named_buffers()} & here.values.keys()
    for state in (here, there):
        with _undone(passes.step), passes.by_itself(0, 2):
            state.restore()
            for name in buffers:
                state.give(name, here.values[name])
            update()
            found.append(held(passes.step))
    here.restore()
    return found[0] != found[1]


@contextmanager
def _undone(step: Step) -> Iterator[None]:
    """Within, an update may be taken; afterwards all is as before."""
    optimizers = with_inner(step.optimizer)
    gradients = {p: p.grad for p in step.named.values()}
    states = [{p: dict(each) for p, each in optimizer.state.items()} for optimizer in optimizers]
    groups = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
    attributes = [dict(vars(optimizer)) for optimizer in optimizers]
    inner = [each for state in states for one in state.values() for each in one.values()]
    own = tree_leaves([optimizer.param_groups for optimizer in optimizers])
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
