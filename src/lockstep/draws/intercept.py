"""torch's random functions, replaced while a piece is in training.

The attributes themselves are replaced, which costs nothing an operator: a function mode would cost a model of many
small operators a third of its time, and is popped by a backward pass that computes checkpointed parts again.
Not seen: a function that a file imported by name before (`from torch.nn.functional import dropout`), torch.jit, and
what torch draws inside its kernels, as between the layers of an LSTM.
"""

import sys
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.draws.keyed import Draws, Keys, asking
from lockstep.draws.replacements import FUNCTIONAL, TENSOR, TORCH

PLACES: tuple[tuple[ModuleType, dict[str, Callable[..., Any]]], ...] = ((F, FUNCTIONAL), (torch, TORCH))

# of other libraries, by module and name: what draws by a tensor's method, which a compiler takes for torch's own
_DRAWING = {"torchvision.ops.stochastic_depth": "stochastic_depth", "timm.layers.drop": "drop_path"}
_lock = threading.Lock()
_users = 0
_before: list[tuple[dict[str, Any], dict[str, Any]]] = []  # namespaces, and what stood in them


@cache
def _namespaces(compiled: bool) -> list[tuple[dict[str, Any], dict[str, Callable[..., Any]]]]:
    """What to replace by what. Compiled code is left at each of the functions, where it would else draw by piece."""
    if not compiled:
        return [(place.__dict__, functions) for place, functions in PLACES]
    off: Any = torch.compiler.disable
    ours = [(place.__dict__, {k: off(f) for k, f in functions.items()}) for place, functions in PLACES]
    others = [(sys.modules[module], name) for module, name in _DRAWING.items() if module in sys.modules]
    return [*ours, *((place.__dict__, {name: off(getattr(place, name))}) for place, name in others)]


@cache
def _replace_methods() -> None:
    """For good: a class that changes loses what Python keeps of it, which would cost every step tens of microseconds.

    Without keys each is torch's own, called by one more function.
    """
    for name, method in TENSOR.items():
        setattr(Tensor, name, method)


def _intercept(compiled: bool) -> None:
    """From here on, in all threads, torch's random functions ask for keys, until as many `_release`s."""
    global _users
    _replace_methods()
    with _lock:
        _users += 1
        if _users == 1:
            for names, functions in _namespaces(compiled):
                _before.append((names, {name: names[name] for name in functions}))
                names.update(functions)


def _release() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _before:
                names, functions = _before.pop()
                names.update(functions)


class keyed(asking):
    """Around forward and backward of one piece: its draws are those of its samples in this step.

    A class, since a generator's context would cost twice as many of a step's microseconds.

    Args:
        draws: of the run.
        model: the bare module, without DDP or what torch.compile returned around it.
        step: over the whole run.
        ids: int64 [b], the piece's samples.
        images: float [b, ...], what the model is given.
    """

    def __init__(self, draws: Draws, model: nn.Module, step: int, ids: np.ndarray, images: Tensor) -> None:
        super().__init__(Keys(draws, model, step, ids, images))
        self.compiled = draws.compiled

    def __enter__(self) -> None:
        _intercept(self.compiled)
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        _release()
