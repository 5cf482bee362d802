"""The recorded samples through Lockstep's own step, from the recorded weights, on several numbers of processes."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lockstep.commands.audit import standins
from lockstep.commands.reproduce.experiment import Experiment, Step
from lockstep.commands.reproduce.recipe import PARTS, Recipe
from lockstep.config import Config
from lockstep.data.augment import Augment
from lockstep.data.loaders import Batch
from lockstep.distributed.launcher import launch
from lockstep.distributed.world import World
from lockstep.training import schedules
from lockstep.training.assemble import Run, assemble


@dataclass(frozen=True)
class Replayed:
    """What one number of processes came to."""

    processes: int
    losses: list[float]  # of each step, the mean over the global batch
    weights: float  # largest difference between the first weights and the recorded ones
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
) -> tuple[list[float], float, float]:
    if experiment.record["stand_ins"]:
        standins.install()
    with _modules_of(folder):
        run = assemble(config, world, torch.float64 if double else None)
    state, recorded = run.model.state_dict(), experiment.initial
    weights = max(float((state[name].double() - each.double()).abs().max()) for name, each in recorded.items())
    if double:  # the file's are float32
        run.model.load_state_dict(recorded)
    difference = _pixels(run, experiment.steps) if pixels else -1.0
    _scale(run, experiment.loss_factor)
    run.step.clip_norm /= experiment.record["clip_scale"]
    losses = []
    for number, step in enumerate(experiment.steps):
        for group, rate in zip(run.step.optimizer.param_groups, step.rates, strict=True):
            group["initial_lr"] = group["lr"] = rate  # as it was: the schedule has its own comparison
        run.step.schedule = None
        losses.append(float(run.step(_batch(run, step, number, world))))
    return losses, weights, difference


@contextmanager
def _modules_of(folder: str) -> Iterator[None]:
    """Within, the folder is the current one, and its modules are imported again."""
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
    shards = run.train.shards(len(step.ids))
    rows = [torch.arange(len(step.ids))[shard.rows] for shard in shards]
    mine = torch.cat(rows)
    images, labels = step.images[mine].to(world.device), step.labels[mine].to(world.device)
    return Batch(images, labels, shards, step.ids, 0, number, number * len(step.ids))


def _scale(run: Run, factor: float) -> None:
    """Give the gradients the size that they had: a fault of the script's is replayed, and the recipe leaves it out."""
    if factor == 1:
        return
    own = run.step.sync.finish

    def finish() -> None:
        own()
        for parameter in run.step.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    run.step.sync.finish = finish  # type: ignore[method-assign]


def _pixels(run: Run, steps: list[Step]) -> float:
    """How far the images that Lockstep's own reading prepares for the recorded ids are from the recorded ones."""
    images, worst = run.train.images, 0.0
    augment = Augment(images.mean, images.std)
    for step in steps:
        pixels, labels = images.read(step.ids, None)
        prepared = augment(pixels, torch.from_numpy(step.ids), None)
        if prepared.shape != step.images.shape and prepared[0].numel() == step.images[0].numel():
            prepared = prepared.reshape(step.images.shape)
        soft = step.labels.is_floating_point()
        if prepared.shape != step.images.shape or not (soft or torch.equal(labels.long(), step.labels.long())):
            return float("inf")
        worst = max(worst, float((prepared.double() - step.images.double()).abs().max()))
    return worst


def rates_apart(experiment: Experiment, draft: Recipe, folder: Path) -> float:
    """The largest relative difference of the recipe's learning rates and those that were seen; -1: not compared."""
    config, seen = draft.config, experiment.rates
    if draft.scheduler or draft.table:
        with _modules_of(str(folder)):
            ours = importlib.import_module(PARTS).rates(len(experiment.steps))[: len(experiment.steps)]
        seen = [step.rates[0] for step in experiment.steps]
    elif draft.rates:
        return 0.0  # they are those that were seen
    elif any("the schedule" in each for each in draft.missing):
        return -1.0
    else:
        factor, n = schedules.factor, experiment.train["length"]
        ours = [config.lr * factor(config.optim, epoch * n, n, config.epochs) for epoch in range(len(seen))]
    return max(relative(a, b) for a, b in zip(ours, seen, strict=True))


def plain(config: Config) -> Config:
    """The config without what a comparison of single steps does not need."""
    model = replace(config.model, compile=False)
    return replace(config, model=model, execution=replace(config.execution, duplicates="never", law="off"))


def relative(ours: float, theirs: float) -> float:
    """The difference of two losses, relative to their size."""
    return abs(ours - theirs) / max(abs(theirs), 1e-12)


def departs(found: Replayed, steps: list[Step], tolerance: float) -> int:
    """The first step whose loss is not the script's until rounding; -1: none."""
    for number, (ours, step) in enumerate(zip(found.losses, steps, strict=True)):
        if not relative(ours, step.loss) <= tolerance:
            return number
    return -1
