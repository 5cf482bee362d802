"""What a step leaves out of torch's Python around a backward pass and an update is noticed by nobody."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.distributed.world import World
from lockstep.randomness import bits, stream
from lockstep.rng.generators import pass_seed
from lockstep.training import step as engine
from lockstep.training.step import TrainStep
from tests.training.test_step import batch_of, inputs, linear, sgd, weights

SINGLE = World.single()
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "foreach": lambda p: torch.optim.SGD(p, 0.1, foreach=True),
}


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[int], loss: Any = F.cross_entropy) -> None:
    for size in sizes:
        batch = batch_of(SINGLE, inputs(size).double())
        optimizer.zero_grad()
        loss(model(batch.images), batch.labels).backward()
        optimizer.step()


def by_step(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[int], loss: Any = F.cross_entropy) -> None:
    step = TrainStep(model, loss, optimizer)
    for number, size in enumerate(sizes):
        step(batch_of(SINGLE, inputs(size).double(), step=number))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_are_those_of_the_loop_by_hand(name: str) -> None:
    found = []
    for take in (by_hand, by_step):
        model = linear(SINGLE)
        take(model, OPTIMIZERS[name](model.parameters()), [8, 8, 5, 1])
        found.append(weights(model).tobytes())
    assert found[0] == found[1]


class Offset(nn.Module):
    """Its gradient is a view of what the backward pass begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.offset


def test_a_gradient_that_is_changed_where_it_lies_does_not_change_the_next_pass() -> None:
    found = []
    for take in (by_hand, by_step):
        model = Offset()
        optimizer = sgd(model, 0.5)

        def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        take(model, optimizer, [2, 2, 2], lambda outputs, _: outputs.sum())
        found.append(model.offset.item())
    assert found == [0.25, 0.25]


@contextmanager
def everybody(optimizer: Any, said: list[str]) -> Iterator[None]:
    """All who may wish to know of an update, one after the other."""

    def note(who: str) -> Callable[..., None]:
        return lambda *_: said.append(who)

    handles = [
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
        register_optimizer_step_pre_hook(note("everyone's pre")),
        register_optimizer_step_post_hook(note("everyone's post")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_schedulers_and_profilers_hear_of_each_update() -> None:
    model = linear(SINGLE)
    optimizer = sgd(model, 0.1)
    said: list[str] = []
    step, numbers = TrainStep(model, F.cross_entropy, optimizer), itertools.count()

    def take() -> None:
        step(batch_of(SINGLE, inputs(4).double(), step=next(numbers)))

    take()
    with everybody(optimizer, said):
        take()
    take()
    assert said == ["everyone's pre", "pre", "post", "everyone's post"]
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: said.append("alone"))
        take()
        handle.remove()
    assert said[4:] == ["alone", "alone"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take()
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # warns where no update came before its own step
    take()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class Watched(Tensor):
    """A tensor of a class of its own, which hears of its backward pass."""

    heard: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.heard.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_of_another_class_has_its_own_backward() -> None:
    Watched.heard.clear()
    leaf = torch.ones((), requires_grad=True)
    engine.backward((2 * leaf).as_subclass(Watched), torch.tensor(3.0))
    assert leaf.grad is not None
    assert float(leaf.grad) == 6
    assert "backward" in Watched.heard
    with pytest.raises(RuntimeError, match="does not require grad"):
        engine.backward(torch.ones(()), torch.ones(()))


def test_a_piece_s_seed_is_its_own_in_each_step() -> None:
    steps, keys = range(0, 200), range(5)
    found = {(seed, step, key): pass_seed(seed, step, key) for seed in (0, 1) for step in steps for key in keys}
    assert len(set(found.values())) == len(found)
    for step in (0, 63, 64, 1000):  # alone or among others
        alone = int(bits(stream(1, "dropout", 3), torch.tensor(step))) % (1 << 64)
        assert pass_seed(1, step, 3) == alone
