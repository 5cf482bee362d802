"""torch's random functions, replaced while a piece is in training.

The attributes themselves are replaced, which costs nothing an operator: a function mode would cost a model of many
small operators a third of its time, and is popped by a backward pass that computes checkpointed parts again.
Not seen: a function that a file imported by name before (`from torch.nn.functional import dropout`), torch.jit, and
what torch draws inside its kernels, as between the layers of an LSTM.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.draws.keyed import Draws, Keys, active, here
from lockstep.draws.replacements import FUNCTIONAL, TENSOR, TORCH

PLACES: tuple[tuple[ModuleType, dict[str, Callable[..., Any]]], ...] = ((F, FUNCTIONAL), (torch, TORCH))

# of other libraries, by module and name: what draws by a tensor's method, which a compiler takes for torch's own
_DRAWING = {"torchvision.ops.stochastic_depth": "stochastic_depth", "timm.layers.drop": "drop_path"}
_lock = threading.Lock()
_users = 0
_taken: tuple["_Names", ...] = ()  # what `_users` have replaced


@dataclass(slots=True)
class _Names:
    """Some names of one namespace, replaced by `update` alone: all else would cost each step microseconds more."""

    namespace: dict[str, Any]
    ours: dict[str, Callable[..., Any]]
    read: Callable[[dict[str, Any]], tuple[Any, ...]] = field(init=False)
    stood: tuple[Any, ...] = ()
    theirs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = list(self.ours)
        self.read = itemgetter(*names) if len(names) > 1 else lambda namespace: (namespace[names[0]],)

    def take(self) -> None:
        found = self.read(self.namespace)
        if found != self.stood:  # at first, and where somebody else has replaced one since
            self.stood, self.theirs = found, dict(zip(self.ours, found, strict=True))
        self.namespace.update(self.ours)

    def give_back(self) -> None:
        self.namespace.update(self.theirs)


@cache
def _names(compiled: bool) -> tuple[_Names, ...]:
    """What to replace by what. Compiled code is left at each of the functions, where it would else draw by piece."""
    if not compiled:
        return tuple(_Names(place.__dict__, functions) for place, functions in PLACES)
    off: Any = torch.compiler.disable
    ours = [_Names(place.__dict__, {k: off(f) for k, f in functions.items()}) for place, functions in PLACES]
    others = [(sys.modules[module], name) for module, name in _DRAWING.items() if module in sys.modules]
    return (*ours, *(_Names(place.__dict__, {name: off(getattr(place, name))}) for place, name in others))


@cache
def _replace_methods() -> None:
    """For good: a class that changes loses what Python keeps of it, which would cost every step tens of microseconds.

    Without keys each is torch's own, called by one more function.
    """
    for name, method in TENSOR.items():
        setattr(Tensor, name, method)


def _intercept(compiled: bool) -> None:
    """From here on, in all threads, torch's random functions ask for keys, until as many `_release`s."""
    global _users, _taken
    _replace_methods()
    with _lock:
        _users += 1
        if _users == 1:
            _taken = _names(compiled)
            for names in _taken:
                names.take()


def _release() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            for names in _taken:
                names.give_back()


@contextmanager
def held(draws: Draws | None) -> Iterator[None]:
    """Around many steps by `draws`: the functions stay replaced between them, where they are torch's own all the same.

    To take them anew costs each step microseconds. Only for a loop between whose steps nobody else replaces one.
    """
    if draws is None or draws.held:
        yield
        return
    _intercept(draws.compiled)
    draws.held = True
    try:
        yield
    finally:
        draws.held = False
        _release()


class keyed:
    """Around forward and backward of one piece: its draws are those of its samples in this step.

    A class that spells out what `asking` does: a generator's context, and each call of a function more, cost a step
    microseconds, for all of this is out of the processor's caches after a backward pass.

    Args:
        draws: of the run.
        model: the bare module, without DDP or what torch.compile returned around it.
        step: over the whole run.
        ids: int64 [b], the piece's samples.
        images: float [b, ...], what the model is given.
    """

    __slots__ = ("before", "keys", "takes")

    def __init__(self, draws: Draws, model: nn.Module, step: int, ids: np.ndarray, images: Tensor) -> None:
        self.keys = Keys(draws, model, step, ids, images)
        self.takes = not draws.held

    def __enter__(self) -> None:
        if self.takes:
            _intercept(self.keys.draws.compiled)
        self.before = getattr(here, "keys", None)
        here.keys = self.keys
        active.append(self.keys)

    def __exit__(self, *_: object) -> None:
        here.keys = self.before
        active.remove(self.keys)
        if self.takes:
            _release()
