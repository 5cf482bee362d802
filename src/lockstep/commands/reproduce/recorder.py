"""What a script trains, noted while it does: the model, its first weights, the loss, the steps, their rates."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.commands.audit.events import line_in
from lockstep.commands.reproduce.expressions import schedulers
from lockstep.commands.reproduce.loaders import Loaders


@dataclass
class Pass:
    """A forward pass with its backward pass."""

    ids: list[int]
    images: Tensor | None = None
    labels: Tensor | None = None
    loss: float = math.nan  # as the loss function gave it
    backward: float = math.nan  # what backward was called on, without a scaler's factor
    at: str = ""  # the user's line that called it


@dataclass
class Recorder:
    """What one process has done so far. `problems`: what this can't follow, each once."""

    steps: int
    loaders: Loaders
    home: str = ""  # the folder of the user's own code
    model: nn.Module | None = None
    place: tuple[int, int] | None = None  # the rank and the processes of the group, where there is one
    initial: dict[str, Tensor] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    passes: list[Pass] = field(default_factory=list)  # since the last step
    counts: list[int] = field(default_factory=list)  # before each step, how often the scheduler was stepped
    taken: list[tuple[list[Pass], list[float]]] = field(default_factory=list)  # the steps: passes, rates of the groups
    loss: dict[str, Any] = field(default_factory=dict)
    weight: Tensor | None = None  # of the classes, in the loss
    clips: list[tuple[str, float, float]] = field(default_factory=list)
    seed: int | None = None
    autocast: str = ""
    compiled: str = ""  # the mode, where something was to be compiled
    channels_last: bool = False
    scale: float = 1.0  # a scaler's, of the gradients now
    unscaled: bool = False  # whether they have lost it again
    clip_scale: float = 1.0  # that of gradients when they were clipped
    skipped: int = 0  # steps that a scaler left out
    versions: list[int] = field(default_factory=list)  # of the gradients, after what is known to change them
    by_hand: str = ""  # the line of a step whose gradients something else has changed
    evaluated: set[str] = field(default_factory=set)  # "model", "copy", "another"
    reduces: bool = False  # whether ranks bring numbers together, once there was an evaluation
    changed: dict[str, str] = field(default_factory=dict)  # "images", "labels": where they are no longer the loader's
    log_probabilities: bool = False
    classes: int = 0
    draws: Any = None  # of lockstep.rng
    options: list[dict[str, Any]] = field(default_factory=list)  # of the optimizer's groups, before the first step
    digest: float = math.nan  # of the weights after the last step
    problems: list[str] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)  # of data and weights that are not there, in words
    depth: int = 0

    @property
    def on(self) -> bool:
        """Whether there are steps left to record: of the first pass over the data."""
        last = self.loaders.last
        return len(self.taken) < self.steps and (last is None or last[0].passes <= 1)

    def say(self, problem: str) -> None:
        """Note what can't be followed, with the user's line that does it."""
        at = line_in(self.home) if self.home else ""
        problem = f"{problem} ({at})" if at else problem
        if problem not in self.problems:
            self.problems.append(problem)

    def stand_in(self, event: str, kind: str, why: str = "", train: bool | None = None, **_: Any) -> None:
        """Note that invented data or weights are in the place of what is not there."""
        part = {True: ", training", False: ", test", None: ""}[train]
        if event == "stand-in" and f"{kind}{part} ({why})" not in self.stand_ins:
            self.stand_ins.append(f"{kind}{part} ({why})")

    def rates(self) -> list[float]:
        """The learning rates of the optimizer's groups; none before there is an optimizer."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is about to be taken with the passes so far."""
        if self.optimizer is not None and optimizer is not self.optimizer:
            self.say("several optimizers")
        self.optimizer = optimizer
        if self.on and self.versions and self.versions != self.gradients() and not self.by_hand:
            self.by_hand = line_in(self.home)
        if not self.taken:
            self.options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        if self.on:
            self.taken.append((self.passes, self.rates()))
            self.counts += [each.last_epoch for each in schedulers(optimizer)[-1:]]
        self.passes = []

    def gradients(self) -> list[int]:
        """Which they are and how often each was written to."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        found = [each.grad for group in groups for each in group["params"] if each.grad is not None]
        return [number for grad in found for number in (grad.data_ptr(), grad._version)]

    def touched(self) -> None:
        """What is known to change the gradients has done so."""
        if self.on:
            self.versions = self.gradients()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step was taken."""
        self.loaders.stepped()
        if self.on and optimizer is self.optimizer:
            self.digest = digest(optimizer)


def digest(optimizer: torch.optim.Optimizer) -> float:
    """A number that moves where a weight of the optimizer's does: the sum of their sizes."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return float(sum(each.detach().double().abs().sum() for each in parameters))
