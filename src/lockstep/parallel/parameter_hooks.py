"""Hooks that a user has put on parameters, called once a step, on the gradient of the global batch.

torch calls them inside backward, where a process has seen a part of the samples: a hook that clips, masks by size or
adds noise would then do something else on each number of processes, and with each number of micro-batches. So they are
taken off the parameters and called after the reduction: first those of `register_hook`, whose result takes the
gradient's place, then those of `register_post_accumulate_grad_hook`, with the parameter. Under fp16 gradients are
unscaled by then; clipping comes afterwards. A handle's `remove()` works as ever.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import optimizer as torchs

from lockstep.errors import UserError
from lockstep.parallel.fsdp import part_of, whole

_Hooks = OrderedDict[int, Callable[..., Any]]
_known: WeakKeyDictionary[nn.Module, "ParameterHooks"] = WeakKeyDictionary()


def hooks_of(model: nn.Module) -> "ParameterHooks":
    """Those of a bare model; what it has on its parameters now is taken off them."""
    found = _known.setdefault(model, ParameterHooks())
    for name, p in model.named_parameters():
        found.take(name, p)
    return found


def step_hooks(optimizer: Any) -> tuple[dict[int, Any], ...]:
    """The functions that torch calls around an optimizer's step: its own, and those of all optimizers."""
    # an optimizer that holds another may never have called torch's __init__, which makes these
    before = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    after = getattr(optimizer, "_optimizer_step_post_hooks", {})
    return before, after, torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks


def hooks_around(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Callable[..., Any]]:
    """The functions that an update calls, numbered: hooks taken off parameters, and those of the optimizer."""
    functions = [*_known.get(model, ()), *(hook for each in step_hooks(optimizer) for hook in each.values())]
    return {f"hook {i}": hook for i, hook in enumerate(functions)}


class ParameterHooks:
    """By the parameter's name: FSDP puts others in the place of a model's parameters."""

    def __init__(self) -> None:
        self.before: dict[str, list[_Hooks]] = {}  # of register_hook
        self.after: dict[str, list[_Hooks]] = {}  # of register_post_accumulate_grad_hook

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return (hook for hooks in (self.before, self.after) for _, hook in _called(hooks))

    def take(self, name: str, p: nn.Parameter) -> None:
        """Take what a user has put on a parameter off it; Lockstep's own hooks are marked, and stay."""
        for attribute, place in (("_backward_hooks", self.before), ("_post_accumulate_grad_hooks", self.after)):
            hooks = getattr(p, attribute)
            if hooks and not all(map(_is_own, hooks.values())):
                own = OrderedDict((key, hook) for key, hook in hooks.items() if _is_own(hook))
                setattr(p, attribute, own)  # a handle removes its hook from the dict that it knows, which is kept
                place.setdefault(name, []).append(hooks)

    def run(self, parameters: dict[str, nn.Parameter]) -> None:
        """Call them on the gradients that the parameters have.

        Raises:
            UserError: where one changes a parameter, as by an optimizer's step.
        """
        if not (any(_called(self.before)) or any(_called(self.after))):
            return
        versions = {name: p._version for name, p in parameters.items()}
        with torch.no_grad():
            for name, hook in _called(self.before):
                if (p := parameters.get(name)) is not None and p.grad is not None:
                    changed = hook(whole(p.grad))
                    if changed is not None:
                        p.grad = part_of(changed, p.grad)
            for name, hook in _called(self.after):
                if (p := parameters.get(name)) is not None and p.grad is not None:
                    hook(p)
        if changed := [name for name, p in parameters.items() if p._version != versions[name]]:
            raise UserError(
                f"a hook on a parameter changes {', '.join(changed[:3])}: an optimizer's step in a hook?",
                "Hand the optimizer to TrainStep, which clips, follows the schedule and saves its state.",
            )


def _called(hooks: dict[str, list[_Hooks]]) -> Iterator[tuple[str, Callable[..., Any]]]:
    return (
        (name, hook)
        for name, each in hooks.items()
        for dictionary in each
        for hook in [*dictionary.values()]
        if not _is_own(hook)
    )


def _is_own(hook: Any) -> bool:
    return getattr(hook, "lockstep", False)
