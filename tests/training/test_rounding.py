"""Rounding is no finding in any type, and hides none."""

import itertools
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as early
from torch.utils.checkpoint import checkpoint

from lockstep.distributed.world import World
from lockstep.parallel.hidden_state import HiddenState
from lockstep.parallel.strategy import parallelize
from lockstep.training.outcomes import UNREPEATED, Finding, Outcome, norms_of
from lockstep.training.step import TrainStep
from tests.ranks import run_ranks
from tests.training.checked_models import found
from tests.training.test_equal_steps import FEATURES, HIDDEN, Net, batch_of


class OutOfReach(Net):
    """Each pass is another one, by what nobody can put back: a generator, as the clock would be."""

    def begin(self) -> None:
        self.scales = (0.5 + i % 5 for i in itertools.count())

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) * next(self.scales)


class Drifting(OutOfReach):
    def begin(self) -> None:
        self.scales = (1 + i / 1000 for i in itertools.count())  # as smooth as rounding's noise


class Timed(Net):
    last = 0.0  # kept, and so put back

    def middle(self, x: Tensor) -> Tensor:
        scale, self.last = 1 + self.last % 1, time.perf_counter()
        return torch.tanh(self.second(x)) * scale


def repeated(world: World) -> set[str]:
    several = [found(world, OutOfReach), found(world, Drifting), found(world, Timed)[:1]]  # what is said comes first
    return {cause for each in several for _, _, cause, _ in each or [(0, "", "silent", 0)]}


def test_what_is_another_one_at_times_is_tried_more_than_once() -> None:
    model = Timed()
    check = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)).check
    before, model.last = check.state(), 1.0
    for later, cause in ((check.state(), UNREPEATED), (before, "")):
        others = [before, before, later]
        assert check.by_time(Finding(0, "state", "last", 1.0), before, others).cause == cause


def test_what_is_another_one_each_time_does_not_pass_as_rounding() -> None:
    assert repeated(World.single()) == {UNREPEATED}
    assert run_ranks(repeated, 2, law=True) == [{UNREPEATED}] * 2


class InSingle(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Autocast(Net):
    """Computes in bfloat16 by itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x.float()).float()


class Casts(InSingle):
    """A layer with weights in bfloat16, another one that casts."""

    def begin(self) -> None:
        self.low = nn.Linear(FEATURES, FEATURES).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.low(x.to(torch.bfloat16)))


def in_low_precision(world: World) -> list[Any]:
    """What is said of models that compute in bfloat16, and of those whose samples see each other there."""
    said, centred = [], {"middle": lambda self, x: torch.tanh(self.second(x - x.mean(0)))}
    kinds: list[tuple[type[Net], dict[str, Any]]] = [(InSingle, {"precision": "bf16"}), (Autocast, {}), (Casts, {})]
    for kind, options in kinds:
        for make in (kind, type("Centring", (kind,), centred)):
            said.append([each[:3] for each in found(world, partial(_in_float32, make), **options)])
    casting = {"middle": lambda self, x: torch.tanh(self.second(x.bfloat16()))}  # which fails without autocast
    made = type("Casting", (InSingle,), casting)
    drawing = {"middle": lambda self, x: checkpoint(self.dropped, x, use_reentrant=False), "dropped": _dropped}
    drawn = found(world, partial(_in_float32, type("Dropping", (Casts,), drawing)))
    return [*said, found(world, partial(_in_float32, made), precision="bf16"), [each[2] for each in drawn]]


def _dropped(self: Net, x: Tensor) -> Tensor:
    return early(torch.tanh(self.second(x)), 0.5, self.training)


def _in_float32(make: type[nn.Module]) -> nn.Module:
    model = make().float()
    if isinstance(model, Casts):
        model.low.bfloat16()
    return model


def test_low_precision_hides_nothing_and_is_no_finding() -> None:
    said = in_low_precision(World.single())
    cause = "the model: what it computes for a sample depends on which others pass with it"
    unkeyed = "the model: it draws from torch's generator by a function whose draws are not keyed by sample"
    assert said == [*([[], [("gradient", "first.weight", cause)]] * 3), [], [unkeyed]]
    assert run_ranks(in_low_precision, 2, law=True) == [said] * 2


class Centred(Net):
    """The second batch norm's mean is one of values that the first has centred: nothing but rounding."""

    def begin(self) -> None:
        self.norms = nn.ModuleList([nn.BatchNorm1d(HIDDEN), nn.BatchNorm1d(HIDDEN)])
        nn.init.zeros_(self.second.bias)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norms[1](self.second(self.norms[0](x))))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.head.weight.dtype))


class Offset(Net):
    """A batch norm of values that lie far from 0: the rounding of their mean is a part of their spread."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.second(x) + 1000))


def rounding(world: World) -> list[str]:
    said, f32, f64 = list[str](), torch.float32, torch.float64
    types = (f32, f32, f32), (f64, f64, f64), (f64, f32, f64), (f64, f64, f32), (torch.bfloat16, f32, f32)
    for make, (dtype, given, into) in [*((Centred, each) for each in types), (Offset, types[0])]:
        torch.manual_seed(0)
        model = parallelize(make().to(dtype), world)
        loss = lambda outputs, labels, into=into: F.cross_entropy(outputs.to(into), labels)  # noqa: E731
        step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1))
        step.check.report = lambda finding, _: said.append(finding.message)
        for t in range(5):
            batch = batch_of(world, 24, t)
            step(replace(batch, images=batch.images.to(given)))
    return said


def test_what_only_rounding_moves_is_no_finding() -> None:
    assert rounding(World.single()) == []
    assert run_ranks(rounding, 2, law=True) == [[], []]


def test_what_may_be_rounding_is_said_when_it_was_seen_twice_in_one_place() -> None:
    model = Net().float()
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    places = ("second.weight", "first.bias", "head.weight", "first.bias")
    news = [step.check._is_news(Finding(t, "gradient", place, 1e-3)) for t, place in enumerate(places)]
    assert news == [False, False, False, True]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_are_those_of_float64(scale: float) -> None:
    x = torch.randn(9_001) * scale
    assert norms_of([x, None]).tolist() == pytest.approx([float(x.double().norm()), 0], rel=1e-6)


@pytest.mark.parametrize(("turned", "found"), [(1e-2, []), (1e-6, ["1.weight"])])
def test_units_that_rounding_turns_off_may_be_in_any_layer(turned: float, found: list[str]) -> None:
    """Moved inputs turn off a unit of the first layer, another order of sums one of the second: that is rounding."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))

    def outcome(first: float, second: float) -> Outcome:
        gradients: list[Tensor | None] = [torch.full((4, 4), 1.0 + each) for each in (first, second)]
        return Outcome(gradients, torch.ones(2, dtype=torch.float64), HiddenState({}, []))

    batch = replace(batch_of(World.single(), 4, 0), images=torch.randn(4, 4), labels=torch.arange(4))
    step.check.start = step.check.state()
    moves = [lambda seed: step.check.apart(outcome(0, 0), outcome(0 if seed is None else turned, 0))] * 3
    compared = step.check.compared(batch, outcome(0, 1e-2), outcome(0, 0), moves)
    assert [each.place for each in compared] == found
