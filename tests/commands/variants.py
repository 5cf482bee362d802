"""Deliberately wrong variants of a run, as a user's own changes might be: `--patch tests.commands.variants:NAME`."""

import itertools
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.data.loaders import Batch, EvalLoader
from lockstep.distributed.world import World
from lockstep.parallel.strategy import parallelize, sync_of
from lockstep.training.assemble import Run
from lockstep.training.losses import RankLoss


def nothing(run: Run, world: World, config: Config) -> None:
    """The right one."""


def no_update(run: Run, world: World, config: Config) -> None:
    """As where each step's gradients overflow."""
    vars(run.step)["_update"] = lambda _: None


class _MeanOfMeans:
    """A plain loop: the mean loss of each rank's share, averaged by DDP over the ranks."""

    def __init__(self, run: Run) -> None:
        self.model, self.optimizer, self.sync = run.step.model, run.step.optimizer, run.step.sync

    def take(self, batch: Batch) -> RankLoss:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(batch.images), batch.labels)
        loss.backward()
        self.optimizer.step()
        return RankLoss([loss.detach()], [len(batch.labels)])


def mean_of_means(run: Run, world: World, config: Config) -> None:
    run.step = _MeanOfMeans(run)  # type: ignore[assignment]


def reshuffle_by_size(run: Run, world: World, config: Config) -> None:
    """The first epoch is right; later ones are seeded with the number of processes."""
    step = run.train.order.step
    run.train.order.step = lambda epoch, t: step(epoch * world.size, t)  # type: ignore[method-assign]


def rank_seeded_augmentation(run: Run, world: World, config: Config) -> None:
    """Flips and shifts drawn from a generator of each process's own."""
    right = run.train.augment
    generator = torch.Generator().manual_seed(config.seed + world.rank)

    def augment(images: Tensor, ids: Tensor, epoch: int | None) -> Tensor:
        out = right(images, ids, epoch)
        shift = int(torch.randint(-1, 2, (), generator=generator))
        mirrored = torch.rand(len(out), generator=generator) < 0.5
        return torch.where(mirrored[:, None, None, None], out.flip(3), out).roll(shift, 2)

    run.train.augment = augment  # type: ignore[assignment]


def rate_times_size(run: Run, world: World, config: Config) -> None:
    """The learning rate multiplied by the number of processes, though the batch is global already."""
    for group in run.step.optimizer.param_groups:
        group["initial_lr"] *= world.size


def reads_what_a_run_left(run: Run, world: World, config: Config) -> None:
    """The first run anywhere leaves a file, by which later ones have larger gradients."""
    mark = Path(config.execution.data_dir) / "mark"
    there = mark.exists()
    world.barrier()
    mark.touch()

    def enlarge(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"] if there else ():
            parameter.grad.mul_(1.5)

    run.step.optimizer.register_step_pre_hook(enlarge)


class _Means(EvalLoader):
    """Yields, in every chunk's place, one image of the rank's part: a rank's own average, whatever it holds."""

    def __iter__(self) -> Any:
        for chunk, images, labels in super().__iter__():
            where = chunk % self.world.size
            yield chunk, images[[where] * len(images)], labels[[where] * len(labels)]


def evaluate_means(run: Run, world: World, config: Config) -> None:
    """Every sample seems to count, and some count for others."""
    val = run.val
    run.val = _Means(val.images, val.augment, val.world, val.read, val.batch_size)


def step_without_optimizer(run: Run, world: World, config: Config) -> None:
    run.step = run.step.__call__  # type: ignore[assignment]


def float_all_reduce(run: Run, world: World, config: Config) -> None:
    """Exact mode's slices, but their gradients added as floats, by DDP's own average."""
    model = parallelize(run.model, world)
    run.step.model, run.step.sync = model, sync_of(model)
    run.step.check.law = "off"


def dropout_by_rank(run: Run, world: World, config: Config) -> None:
    """Masks seeded by process."""
    assert run.step.draws is not None
    run.step.draws.seed += world.rank


def bare_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Nothing that looks at more than one image."""
    inputs = in_channels * image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, num_classes))


def normed_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """A small network with batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * image_size**2, num_classes),
    )


def dropping_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """The same with dropout."""
    net = normed_net(in_channels, num_classes, image_size)
    return nn.Sequential(*net[:4], nn.Dropout(0.2), net[4])


class _Centred(nn.Module):
    """Keeps a moving mean by giving its buffer a new tensor in each pass; its outputs may do without."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used = used
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * images.detach().mean()
        return images - self.mean if self.used else images


def centred_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """A network with a buffer that it replaces."""
    return nn.Sequential(_Centred(True), *bare_net(in_channels, num_classes, image_size))  # type: ignore[misc]


def averaging_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Its loss does not depend on its buffer."""
    return nn.Sequential(_Centred(False), *bare_net(in_channels, num_classes, image_size))  # type: ignore[misc]


def narrow_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """A network that runs in float32 alone."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(in_channels * image_size**2, num_classes)

        def forward(self, images: Tensor) -> Tensor:
            if images.dtype != torch.float32:
                raise TypeError("float32 alone")
            return self.out(images.flatten(1))

    return Narrow()


def casting_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """A layer with weights in bfloat16, after which the model casts back."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(in_channels * image_size**2, 16).bfloat16()
            self.out = nn.Linear(16, num_classes)

        def forward(self, images: Tensor) -> Tensor:
            return self.out(self.low(images.flatten(1).bfloat16()).relu().float())

    return Casting()


def centring_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """A network that takes its batch's mean away, in float32 alone."""

    class Centring(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            flat = images.flatten(1)
            return super().forward(flat - flat.mean(0) if flat.dtype == torch.float32 else flat)

    return Centring(in_channels * image_size**2, num_classes)


class _Turning(nn.Module):
    """Another one in every fourth pass, by a generator, which nobody can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = (turn for turn in itertools.cycle((1.0, 1.0, 1.0, 1.5)))

    def forward(self, images: Tensor) -> Tensor:
        return images * next(self.turns) if self.training else images


def turning_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(_Turning(), *bare_net(in_channels, num_classes, image_size))  # type: ignore[misc]


def by_the_clock(run: Run, world: World, config: Config) -> None:
    """Images of another brightness in each run, and a word about it before the first step."""
    augment, factor = run.train.augment, 1 + time.time_ns() % 1_000_003 * 1e-7
    run.train.augment = lambda *args: augment(*args) * factor  # type: ignore[assignment]
    run.notes.append("note: weights will differ with every run: the clock. --law off looks no more")


def small() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A user's own set: 90 training and 30 validation images of 6x6, three classes."""
    generator = torch.Generator().manual_seed(3)
    sets = []
    for count in (90, 30):
        labels = torch.randint(0, 3, (count,), generator=generator)
        images = torch.randint(0, 200, (count, 1, 6, 6), generator=generator)
        images[torch.arange(count), 0, labels] += 55
        sets.append((images.to(torch.uint8), labels))
    return sets[0], sets[1]


def images_by_threads(run: Run, world: World, config: Config) -> None:
    """As a kernel whose sums depend on the threads, much enlarged."""
    augment = run.train.augment
    factor = 1 + 1e-3 * (config.execution.threads - 1)
    run.train.augment = lambda *args: augment(*args) * factor  # type: ignore[assignment]
