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
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.draws.keyed import Draws, Keys, asking
from lockstep.draws.replacements import FUNCTIONAL, TENSOR, TORCH
from lockstep.randomness import stream

PLACES: tuple[tuple[Any, dict[str, Callable[..., Any]]], ...] = ((F, FUNCTIONAL), (torch, TORCH), (Tensor, TENSOR))

# of other libraries, by module and name: what draws by a tensor's method, which a compiler takes for torch's own
_DRAWING = {"torchvision.ops.stochastic_depth": "stochastic_depth", "timm.layers.drop": "drop_path"}
_lock = threading.Lock()
_users = 0
_before: list[tuple[Any, str, Any]] = []  # what stood there; None where it was inherited


@cache
def _places(compiled: bool) -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
    """What to replace by what. Compiled code is left at each of the functions, where it would else draw by piece."""
    if not compiled:
        return list(PLACES)
    off: Any = torch.compiler.disable
    places = [(place, {k: off(f) for k, f in functions.items()}) for place, functions in PLACES if place is not Tensor]
    others = [(sys.modules[module], name) for module, name in _DRAWING.items() if module in sys.modules]
    return [*places, (Tensor, TENSOR), *((place, {name: off(getattr(place, name))}) for place, name in others)]


@contextmanager
def intercepted(compiled: bool = False) -> Iterator[None]:
    """Within, in all threads: torch's random functions ask for keys. A microsecond or two for each entry."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for place, functions in _places(compiled):
                _before.extend((place, name, place.__dict__.get(name)) for name in functions)
                for name, function in functions.items():
                    setattr(place, name, function)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                while _before:
                    place, name, function = _before.pop()
                    delattr(place, name) if function is None else setattr(place, name, function)


@contextmanager
def keyed(draws: Draws, model: nn.Module, step: int, ids: np.ndarray, images: Tensor) -> Iterator[None]:
    """Around forward and backward of one piece: its draws are those of its samples in this step.

    Args:
        draws: of the run.
        model: the bare module, without DDP or what torch.compile returned around it.
        step: over the whole run.
        ids: int64 [b], the piece's samples.
        images: float [b, ...], what the model is given.
    """
    with intercepted(draws.compiled), asking(Keys(draws, model, stream(draws.seed, "draws", step), ids, images)):
        yield
