"""The recorded samples through Lockstep's own step, from the recorded weights, on several numbers of processes."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lockstep.commands.reproduce.copies import warmed
from lockstep.commands.reproduce.experiment import Experiment, Step
from lockstep.commands.reproduce.recipe import PARTS, Recipe
from lockstep.config import Config
from lockstep.data.augment import Augment
from lockstep.data.loaders import Batch
from lockstep.processes.launcher import launch
from lockstep.processes.world import World
from lockstep.training import schedules
from lockstep.training.assemble import Run, assemble
from lockstep.training.average import Average


@dataclass(frozen=True)
class Replayed:
    """What one number of processes came to."""

    processes: int
    losses: list[float]  # of each step, the mean over the global batch
    weights: float  # largest difference between the first weights and the recorded ones
    average: float  # largest difference between the moving averages after the last step; -1: not compared
    pixels: float  # largest difference between images as Lockstep prepares them and the recorded ones; -1: not compared


def replay(
    experiment: Experiment, config: Config, folder: Path, nproc: int, pixels: bool, double: bool = False
) -> Replayed:
    """Take the recorded steps on `nproc` processes by a config whose parts are in a folder."""
    config = config.with_execution(nproc=nproc, workers=0, device="cpu")
    if experiment.record["cuda"]:  # pretended GPUs compute in float32
        config = replace(config, precision="fp32")
    what = experiment, config, str(folder), pixels, double
    return Replayed(nproc, *launch(_steps, *what, nproc=nproc, execution=config.execution)[0])


def _steps(
    world: World, experiment: Experiment, config: Config, folder: str, pixels: bool, double: bool
) -> tuple[list[float], float, float, float]:
    with _modules_of(folder):
        run = assemble(config, world, torch.float64 if double else None)
    state, recorded = run.model.state_dict(), experiment.initial
    weights = max(float((state[name].double() - each.double()).abs().max()) for name, each in recorded.items())
    if double:  # the file's are float32
        run.model.load_state_dict(recorded)
        if run.ema is not None:
            run.ema.module.load_state_dict(recorded)
    difference = _pixels(run, experiment.steps) if pixels else -1.0
    _scale(run, experiment.loss_factor)
    run.step.clip_norm /= experiment.record["clip_scale"]
    begun = [] if run.ema is None else [each.detach().clone() for each in run.ema.module.parameters()]
    losses = []
    for number, step in enumerate(experiment.steps):
        for group, rate in zip(run.step.optimizer.param_groups, step.rates, strict=True):
            group["initial_lr"] = group["lr"] = rate  # as it was: the schedule has its own comparison
        run.step.schedule = None
        summed = run.step(_batch(run, step, number, world))
        losses.append(float(world.sum(summed.double().clone())) / len(step.ids))
        if run.ema is not None:
            run.ema.update_parameters(run.model)
            if number == 0:
                _begin_as_recorded(run.ema, begun, experiment.record["average"]["decays"])
    return losses, weights, _average(run, experiment), difference


def _begin_as_recorded(average: Average, begun: list[Tensor], decays: list[float]) -> None:
    """The first update has taken the model's weights, where the script's may have kept a part of the first ones."""
    for mine, first in zip(average.module.parameters(), begun, strict=True):
        mine.detach().lerp_(first, decays[0])
    warm = warmed(decays)
    average.n_averaged += warm[1] if warm else 0


def _average(run: Run, experiment: Experiment) -> float:
    recorded = experiment.average
    if run.ema is None or len(experiment.record["average"]["decays"]) != len(experiment.steps):
        return -1.0
    named = {name: each.detach().double() for name, each in run.ema.module.named_parameters()}
    return max(float((named[name] - each.double()).abs().max()) for name, each in recorded.items())


@contextmanager
def _modules_of(folder: str) -> Iterator[None]:
    """Within, the folder is the current one, and its modules are imported anew."""
    before = Path.cwd()
    sys.modules.pop(PARTS, None)
    sys.path.insert(0, folder)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(folder)


def _batch(run: Run, step: Step, number: int, world: World) -> Batch:
    pieces = run.train.pieces(len(step.ids))
    rows = [torch.arange(len(step.ids))[piece.rows] for piece in pieces]
    mine = torch.cat(rows)
    images, labels = step.images[mine].to(world.device), step.labels[mine].to(world.device)
    return Batch(images, labels, pieces, step.ids, 0, number, number * len(step.ids))


def _scale(run: Run, factor: float) -> None:
    """Give the gradients the size that they had: a fault of the script's is replayed, and the recipe leaves it out."""
    if factor == 1:
        return
    own = run.step._divide

    def divide() -> None:
        own()
        for parameter in run.step.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    run.step._divide = divide  # type: ignore[method-assign]


def _pixels(run: Run, steps: list[Step]) -> float:
    """How far the images that Lockstep's own reading prepares for the recorded ids are from the recorded ones."""
    images, worst = run.train.images, 0.0
    augment = Augment(images.mean, images.std)
    for step in steps:
        pixels, labels = images.read(step.ids, None)
        prepared = augment(pixels, torch.from_numpy(step.ids), None)
        if prepared.shape != step.images.shape and prepared[0].numel() == step.images[0].numel():
            prepared = prepared.reshape(step.images.shape)
        if prepared.shape != step.images.shape or not bool(_same_labels(labels, step.labels)):
            return float("inf")
        worst = max(worst, float((prepared.double() - step.images.double()).abs().max()))
    return worst


def _same_labels(ours: Tensor, theirs: Tensor) -> bool:
    return theirs.is_floating_point() or torch.equal(ours.long(), theirs.long())


def rates_apart(experiment: Experiment, made: Recipe, folder: Path) -> float:
    """The largest relative difference of the recipe's learning rates and those that were seen; -1: not compared."""
    config, seen = made.config, experiment.rates
    if made.scheduler or made.table:
        with _modules_of(str(folder)):
            ours = importlib.import_module(PARTS).rates(len(experiment.steps))[: len(experiment.steps)]
        seen = [step.rates[0] for step in experiment.steps]
    elif made.rates:
        return 0.0  # they are those that were seen
    elif any("the schedule" in each for each in made.lost):
        return -1.0
    else:
        factor, n = schedules.factor, experiment.train["length"]
        ours = [config.lr * factor(config.optim, epoch * n, n, config.epochs) for epoch in range(len(seen))]
    return max(relative(a, b) for a, b in zip(ours, seen, strict=True))


def plain(config: Config) -> Config:
    """The config without what a comparison of single steps does not need."""
    model = replace(config.model, compile=False)
    return replace(config, model=model, execution=replace(config.execution, duplicates="never", probe=False))


def relative(ours: float, theirs: float) -> float:
    """The difference of two losses, relative to their size."""
    return abs(ours - theirs) / max(abs(theirs), 1e-12)


def departs(found: Replayed, steps: list[Step], tolerance: float) -> int:
    """The first step whose loss is not the script's until rounding; -1: none."""
    for number, (ours, step) in enumerate(zip(found.losses, steps, strict=True)):
        if not relative(ours, step.loss) <= tolerance:
            return number
    return -1
