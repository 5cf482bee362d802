"""Faults planted into a run, each on two processes alone, as a bug in the code would be: `--patch` names one.

They go in by public hooks, of loaders, modules, parameters and the optimizer, after what the step does by itself.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.data.augment import Mixing, Pairs
from lockstep.data.loaders import Batch
from lockstep.distributed.world import World
from lockstep.training.assemble import Run
from lockstep.training.losses import RankLoss


def _at_updates(run: Run, change: Callable[[int], object], after: bool = False) -> None:
    """Call change(step, from 1) before each update, when gradients are reduced and clipped, or after it."""
    calls = 0  # no iterator: the comparison of steps puts a number back

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        change(calls)

    optimizer = run.step.optimizer
    (optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook)(hook)


def _scale_gradients(run: Run, factor: float, names: tuple[str, ...] = (), step: int = 0) -> None:
    """Multiply gradients, of some parameters, in one step (0: in each)."""

    def scale(now: int) -> None:
        for name, parameter in run.model.named_parameters():
            if parameter.grad is not None and (not names or name in names) and step in (0, now):
                parameter.grad.mul_(factor)

    _at_updates(run, scale)


# Gradients and their sum


def tiny_factor(run: Run, world: World, config: Config) -> None:
    """Less than what any tolerance for float32 can see."""
    if world.size == 2:
        _scale_gradients(run, 1 + 3e-7)


def one_parameter_not_reduced(run: Run, world: World, config: Config) -> None:
    _scale_gradients(run, 1 + 0.1 * world.rank, ("1.bias",))


def nan_on_two(run: Run, world: World, config: Config) -> None:
    if world.size == 2:
        _scale_gradients(run, float("nan"), step=3)


def overflow_on_two(run: Run, world: World, config: Config) -> None:
    """One gradient of fp16 overflows in the second step of two processes, whose scaler leaves that step out."""
    weight = next(run.model.parameters())
    calls = iter(range(1, 1 << 30))
    if world.size == 2:
        weight.register_hook(lambda grad: grad * float("inf") if next(calls) == 2 else grad)


class _Huge(nn.Module):
    """Too large on the way for float32, and not for float64."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, images: Tensor) -> Tensor:
        return images * self.factor * self.factor / self.factor / self.factor


def outgrown_float32(run: Run, world: World, config: Config) -> None:
    if world.size == 2:
        big = _Huge(1e30)
        run.model.register_forward_hook(lambda module, args, outputs: big(outputs))


# The update


class _Step:
    """The step, with something else around it."""

    def __init__(self, run: Run) -> None:
        self.step, self.optimizer, self.sync = run.step, run.step.optimizer, run.step.sync

    def take(self, batch: Batch) -> RankLoss:
        return self.step.take(batch)


def remainder_dropped(run: Run, world: World, config: Config) -> None:
    """The last of the accumulated micro-batches never passes."""

    class Dropping(_Step):
        def take(self, batch: Batch) -> RankLoss:
            if len(batch.shards) < 3 or world.size == 1:
                return self.step.take(batch)
            shards = batch.shards[:-1]
            left = sum(shard.size for shard in shards)
            return self.step.take(replace(batch, images=batch.images[:left], labels=batch.labels[:left], shards=shards))

    run.step = Dropping(run)  # type: ignore[assignment]


def momentum_drifts(run: Run, world: World, config: Config) -> None:
    def drift(_: int) -> None:
        for held in run.step.optimizer.state.values():
            held["momentum_buffer"].mul_(1 + 1e-6 * world.rank)

    _at_updates(run, drift, after=True)


def momentum_lost(run: Run, world: World, config: Config) -> None:
    def lose(step: int) -> None:
        if step == 2 and world.size == 2:
            for held in run.step.optimizer.state.values():
                held["momentum_buffer"].zero_()

    _at_updates(run, lose, after=True)


def decay_by_size(run: Run, world: World, config: Config) -> None:
    for group in run.step.optimizer.param_groups:
        group["weight_decay"] = 0.01 * world.size


def average_of_one_rank(run: Run, world: World, config: Config) -> None:
    assert run.ema is not None
    if world.rank == 1:
        run.ema.update_parameters = lambda model: None  # type: ignore[method-assign]


# Data


class _WithinTheShare(Mixing):
    def __call__(self, images: Tensor, labels: Tensor, pairs: Pairs, epoch: int, first: int) -> tuple[Tensor, Tensor]:
        own = np.arange(len(pairs.partner))
        partner = np.where((own ^ 1) < len(own), own ^ 1, own)
        return super().__call__(images, labels, replace(pairs, partner=partner), epoch, first)


def mixed_within_the_share(run: Run, world: World, config: Config) -> None:
    """A partner among the rank's own samples, as where each process mixes its own batch."""
    run.train.mixing = _WithinTheShare(**vars(run.train.mixing))


# Forward passes


def buffers_of_one_rank(run: Run, world: World, config: Config) -> None:
    run.step.sync.watch_buffers = lambda: None  # type: ignore[method-assign]
    run.step.sync.synchronize = lambda: None  # type: ignore[method-assign]


def kernel_by_size(run: Run, world: World, config: Config) -> None:
    """Two processes meet a kernel that rounds otherwise."""
    if world.size == 2:
        run.model.register_forward_pre_hook(lambda module, args: (_rounded_otherwise(args[0]),))


def _rounded_otherwise(images: Tensor) -> Tensor:
    return (images / 3) * 3
