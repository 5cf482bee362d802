"""Moving averages of the weights: copies of the model that follow it, whoever moves them.

The class that keeps the average is not asked. A copy's weights e after a step are d e' + (1 - d) w, with e' those
before it and w the model's: d is fitted by least squares over all weights, and what is left says whether it is so.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.commands.reproduce import made

_FITS = 1e-2  # of the step's size, what may be left: float32 rounds a small step of an average that hardly moves


@dataclass
class Copy:
    """A module with the model's own parameters, and how it has moved."""

    module: nn.Module
    at: str  # the user's line that made it
    born: int  # steps before it was found
    weights: Tensor  # [parameters], when it was looked at last
    decays: list[float] = field(default_factory=list)  # of each step so far; nan: it did not follow the model

    @property
    def moved(self) -> bool:
        """Whether it is more than a copy that is taken now and then."""
        return any(each not in (0, 1) for each in self.decays)


@dataclass
class Copies:
    """All copies of the model."""

    found: dict[int, Copy] = field(default_factory=dict)
    steps: int = 0  # looked at

    def look(self, model: nn.Module, steps: int) -> None:
        """See how the copies have moved, once after each step; `steps`: taken so far."""
        if steps and steps <= self.steps:
            return
        self.steps = steps
        now = flat(model)
        for copy in self.found.values() if steps else ():
            moved = flat(copy.module)
            copy.decays.append(decay(copy.weights, moved, now))
            copy.weights = moved
        for module, at in made.alike(model):
            if id(module) not in self.found:
                self.found[id(module)] = Copy(module, at, steps, flat(module))

    def average(self) -> Copy | None:
        """The copy that follows the model; of several the last one."""
        return next((each for each in reversed(self.found.values()) if each.moved), None)

    def state(self) -> dict[str, Tensor]:
        """The average's parameters, as they were when it was looked at last; none where there is none."""
        copy = self.average()
        if copy is None:
            return {}
        named = dict(copy.module.named_parameters())
        parts = torch.split(copy.weights, [each.numel() for each in named.values()])
        return {name: part.reshape(each.shape) for (name, each), part in zip(named.items(), parts, strict=True)}

    def told(self) -> dict[str, Any]:
        """The average as JSON; {}: there is none."""
        copy = self.average()
        return {} if copy is None else {"at": copy.at, "born": copy.born, "decays": copy.decays}


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector, on the host."""
    return torch.cat([each.detach().cpu().reshape(-1) for each in model.parameters()])


def decay(before: Tensor, after: Tensor, model: Tensor) -> float:
    """The part of itself that an average kept; nan where it did not move towards the model. Vectors [parameters]."""
    was, now = (before - model).double(), (after - model).double()
    if torch.equal(before, after):
        return 1.0
    size = float(was.dot(was))
    found = float(now.dot(was)) / size if size else math.nan
    left = float((now - found * was).norm())
    moved = float((after - before).double().norm())
    return found if left <= _FITS * moved else math.nan


def constant(decays: list[float]) -> float:
    """The one decay of all updates but the first, which may be a copy; 0: there is none such."""
    later = decays[1:]
    if not later or not all(0 < each < 1 for each in later):
        return 0.0
    middle, spread = sorted(later)[len(later) // 2], max(later) - min(later)
    if spread > 0.1 * (1 - middle):
        return 0.0
    for digits in range(1, 8):  # the shortest number that it may have been
        if abs(round(middle, digits) - middle) <= max(spread, 1e-6):
            return round(middle, digits)
    return middle


def warmed(decays: list[float]) -> tuple[float, int] | None:
    """Of decays min(cap, (1 + n) / (10 + n)), n counting the updates: the cap and n at the first of them.

    None: they are others. The cap is 0 where no update has come to it. The first decay may be any.
    """
    later = decays[1:]
    for first in (0, 1):
        rising = [(1 + n) / (10 + n) for n in range(first + 1, first + 1 + len(later))]
        # two that follow each other differ by more, up to n = 80
        same = [abs(each - warm) <= _FITS * (1 - warm) for each, warm in zip(later, rising, strict=True)]
        warm = same.index(False) if False in same else len(later)
        capped = later[warm:]
        if warm < 2 or any(cap > rising[warm] for cap in capped):
            continue
        if not capped:
            return 0.0, first
        cap = constant([0.0, *capped])
        if cap:
            return cap, first
    return None
