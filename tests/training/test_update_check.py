"""Updates that depend on the process or on the time are said, and a check leaves an optimizer as it was."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.parallel.strategy import parallelize
from lockstep.training.outcomes import Finding
from lockstep.training.step import TrainStep
from tests.hostile.runs import neutral
from tests.ranks import run_ranks
from tests.training.checked_models import SIZES
from tests.training.test_equal_steps import HIDDEN, Net, batch_of

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep")


class Taken(Net):
    taken = 0  # samples that have passed together

    def forward(self, x: Tensor) -> Tensor:
        self.taken = len(x)
        return super().forward(x)


HOOKS: tuple[Callable[..., Any], ...] = (
    lambda sgd, *_: sgd.param_groups[0].update(lr=1e-3 * time.perf_counter()),
    lambda sgd, *_: sgd.param_groups[0].update(lr=0.1 * (dist.get_world_size() if dist.is_initialized() else 1)),
    lambda sgd, *_: (dist.is_initialized() and dist.get_rank()) or sgd.param_groups[0]["params"][0].data.mul_(0.9),
    lambda sgd, *_: sgd.param_groups[0].update(lr=0.01 * sgd.param_groups[0]["net"].taken),
    lambda sgd, *_: [
        dist.all_reduce(p.data.div_(dist.get_world_size()))
        for p in sgd.param_groups[0]["params"] * dist.is_initialized()
    ],
)


class Remembers(torch.optim.SGD):
    """Steps back now and then, by what it keeps; draws noise."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        self.slow = getattr(self, "slow", None) or [p.detach().clone() for p in params]
        self.count = getattr(self, "count", 0) + 1
        super().step(closure)
        for p, slow in zip(params, self.slow, strict=True):
            p.data.add_(0.01 * torch.randn_like(p))
            if self.count % 2 == 0:
                p.data.copy_(slow.lerp_(p.data, 0.5))


class Lookahead(torch.optim.Optimizer):
    """Holds an optimizer that takes the steps, and goes halfway back to its own weights after every second one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, defaultdict(dict)
        self.defaults, self.count = inner.defaults, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                p.data = slow.lerp_(p.data, 0.5).clone()


class Compiled(nn.Module):
    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.inner(x) * (1 + self.passes)


class Cycling(Net):
    """Forward takes the next one of some numbers from an iterator, and freezes a layer in every third pass.

    Another part was compiled by torch.jit.
    """

    def begin(self) -> None:
        self.passes, self.scales, self.signs = 0, itertools.cycle([1.0, 0.5, 2.0]), [itertools.count()]
        self.compiled = torch.jit.script(Compiled())

    def middle(self, x: Tensor) -> Tensor:
        self.passes += self.training
        self.second.requires_grad_(self.passes % 3 > 0)
        return torch.tanh(self.compiled(self.second(x))) * next(self.scales)


class Means(torch.optim.SGD):
    """Goes by the mean of the last gradients, which it keeps in a list of its state."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            last = self.state[p].setdefault("last", [])
            last.append(p.grad.clone())
            p.grad = torch.stack(last[-3:]).mean(0)
        return super().step(closure)


class Counts(torch.optim.SGD):
    """Counts its steps in a tensor of a parameter group, as timm's Lamb does, and those of all in its class."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0].setdefault("step", torch.zeros(())).add_(1)
        type(self).count += 1
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            p.grad /= float(self.param_groups[0]["step"]) + self.count
        return super().step(closure)


def held(world: World, law: Any) -> list[tuple[list[float], list[str]]]:
    """Weights after steps of an optimizer that holds another, and of one with lists, and what is said."""
    found, Counts.count = [], 0
    for make in (lambda *args, **options: Lookahead(torch.optim.SGD(*args, **options)), Means, Counts):
        torch.manual_seed(0)
        model, said = parallelize(Cycling(), world), list[str]()
        step = TrainStep(model, F.cross_entropy, make(model.parameters(), 0.1, momentum=0.9), law=law)
        step.check.report = lambda finding, _, said=said: said.append(finding.message)  # type: ignore[misc]
        for t, n in enumerate(SIZES):
            step(batch_of(world, n, t))
        found.append((torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), said))
    return found


def test_checks_leave_an_optimizer_within_another_lists_and_an_iterator_as_they_were() -> None:
    one = held(World.single(), "off")
    assert held(World.single(), "warn") == one
    for rank in run_ranks(held, 2, "warn", law=True):
        for (weights, said), (expected, _) in zip(rank, one, strict=True):
            assert np.abs(np.subtract(weights, expected)).max() < 1e-11
            assert said == []


def updated(world: World) -> list[list[str]]:
    """What is said of updates, by a hook on a step of torch's optimizer, or by an optimizer of its own; and weights."""
    found = []
    for hook, kind in (*((hook, torch.optim.SGD) for hook in HOOKS), (None, Remembers)):
        torch.manual_seed(0)
        model = parallelize(net := Taken(), world)
        optimizer = kind(model.parameters(), 0.1, momentum=0.5)
        optimizer.param_groups[0]["net"] = net
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        optimizer.register_step_post_hook(hook or (lambda *_, schedule=schedule: schedule.step()))
        step, said = TrainStep(model, F.cross_entropy, optimizer), list[str]()

        def report(finding: Finding, first: bool, said: list[str] = said) -> None:
            said += [neutral(finding.message)] if first else []

        step.check.report = report
        for t, n in enumerate(SIZES):
            step(batch_of(world, n, t))
        found.append(said)
    off = TrainStep(model, F.cross_entropy, optimizer, law="off")
    off(batch_of(world, 12, 6))
    return [*found, [str(optimizer.count), str(schedule.last_epoch)]]  # type: ignore[attr-defined]


def test_updates_that_depend_on_process_or_time_are_said_and_others_leave_no_trace() -> None:
    said = {str(rank) for rank in [updated(World.single()), *run_ranks(updated, 3, law=True)]}
    differ = "weights will differ with the number of process: at step # the update"
    what = "depends on the process, on how many there are, or on the time, first in"
    lr, first = ([f"{differ} {what} {name}"] for name in ("lr of parameter group #", "first.weight"))
    left = [f"{differ} follows what the sample of one process leave in taken"]
    assert said == {str([lr, lr, first, left, [], [], ["7", "14"]])}  # of Remembers as its own, and as SGD's
