"""Images that follow a loop's own draws, their batch or the process are said; processes at different steps refused."""

import os
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data.augment import Augment
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import TrainLoader, reader
from lockstep.data.order import Order
from lockstep.distributed.failures import is_peer_gone
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.strategy import parallelize
from lockstep.training.assemble import loaders
from lockstep.training.evaluation import evaluate
from lockstep.training.step import TrainStep
from tests.hostile.runs import neutral
from tests.ranks import run_ranks
from tests.training.checked_models import SIZES
from tests.training.test_equal_steps import CLASSES, FEATURES, Net, batch_of


def noisy(world: World, draws: bool, seeded: bool = False) -> list[str]:
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(0) if seeded else None
    model = parallelize(Net(), world)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    said, given = list[str](), weakref.WeakSet[Tensor]()
    step.check.report = lambda finding, _: said.append(neutral(finding.message))
    for t, n in enumerate(SIZES):
        batch = batch_of(world, n, t)
        batch._loaded = batch._contents()
        if draws:
            noise = torch.randn(batch.images.shape, generator=own, dtype=batch.images.dtype)
            batch = replace(batch, images=batch.images + 0.1 * noise)
        else:
            batch.images.mul_(2)
            with torch.random.fork_rng():
                torch.manual_seed(1)
        given.add(batch.images)
        step(batch)
    assert len(given) == 1, "looking for generators keeps no batch"
    return said


def test_images_that_a_loop_changes_by_random_numbers_are_said() -> None:
    said = [noisy(World.single(), True), *run_ranks(noisy, 2, True, law=True)]
    assert said == [said[0]] * 3
    cause = "the batch is not as the loader gave it, and was changed by random numbers of"
    assert f"{cause} torch's generator" in said[0][0]
    assert f"{cause} own" in noisy(World.single(), True, seeded=True)[0]
    assert noisy(World.single(), False) == []


class ByPlace(Augment):
    """Draws for an image by its place in the batch."""

    def __call__(self, images: Tensor, ids: Tensor, epoch: int | None) -> Tensor:
        return super().__call__(images, torch.arange(len(ids)), epoch)


class OfRank(Augment):
    def __call__(self, images: Tensor, ids: Tensor, epoch: int | None) -> Tensor:
        return super().__call__(images, ids, epoch) * (1 + int(os.environ.get("RANK", "0")))


def augmented(world: World, kind: type[Augment]) -> list[str]:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 1, 4, 4), dtype=np.uint8)
    images = ArraySet("noise", ("a", "b", "c"), (0.5,), (0.2,), (pixels,), np.arange(40) % 3, "noise")
    order, augment = Order(40, 12, 0), kind((0.5,), (0.2,), 7, crop_padding=2, flip=True)
    train = TrainLoader(images, order, augment, world, reader(images, world.device))
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), world)
    step, said = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)), list[str]()
    step.check.report = lambda finding, _: said.append(neutral(finding.message))
    for epoch in train.epochs(2):
        for batch in epoch:
            step(batch)
    return said


def test_an_image_that_follows_its_batch_or_process_is_said() -> None:
    kinds: dict[type[Augment], str] = {ByPlace: "in its batch than made by itself", OfRank: "by the process's rank"}
    for kind, cause in kinds.items():
        first, *others = augmented(World.single(), kind), *run_ranks(augmented, 2, kind, law=True)
        assert others == [first, first]
        assert f"an image is another one {cause}" in "".join(first)
    assert augmented(World.single(), Augment) == []
    assert run_ranks(augmented, 2, Augment, law=True) == [[], []]


def out_of_step(world: World, way: str) -> str:
    model = parallelize(nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES).double()), world)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    pictures = torch.randn(8, 1, 1, FEATURES, dtype=torch.float64), torch.arange(8) % CLASSES
    _, val = loaders((pictures, pictures), world, batch_size=4, workers=0)
    try:
        for t, n in enumerate((12, 12, 9, 12, 12, 12, 12)):
            if (t, world.rank) == (5, 1):
                if way != "continue":
                    break
                continue
            step(batch_of(world, n, t))
        world.gather(1.5) if way == "gather" else evaluate(model, val, world)
    except UserError as error:
        return str(error)
    except RuntimeError as error:
        if not is_peer_gone(error):
            raise
    return ""


@pytest.mark.parametrize(
    ("way", "places"),
    [
        ("continue", "rank 0 is at step 6, rank 1 is at step 7"),
        ("break", "rank 0 is at step 6, rank 1 is at an evaluation"),
        ("gather", "rank 0 is at step 6, rank 1 is at a world.gather"),
    ],
)
def test_processes_that_no_longer_take_the_same_steps_are_refused(way: str, places: str) -> None:
    sentences = {each for each in run_ranks(out_of_step, 2, way, law=True) if each}
    assert len(sentences) == 1
    assert f"the processes no longer take the same steps: {places}" in sentences.pop()


def decided(world: World, accumulate: int) -> list[float]:
    """A loop that lowers its rate by the loss, and ends by it."""
    torch.manual_seed(0)
    model = parallelize(Net(), world)
    step, means = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)), list[float]()
    for t, n in enumerate((12, 9, 12, 5, 12, 9, 12, 12)):
        batch = batch_of(world, n, t, accumulate)
        means.append(float(step(batch)))
        if len(means) > 1 and means[-1] > means[-2]:
            step.optimizer.param_groups[0]["lr"] *= 0.5
        if means[-1] < means[0]:
            break
    return means


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_loop_decides_by_its_loss_is_the_same_on_any_number_of_processes(accumulate: int) -> None:
    alone, *others = decided(World.single(), accumulate), *run_ranks(decided, 3, accumulate, law=True)
    assert others == [others[0]] * 3
    assert others[0] == pytest.approx(alone, rel=1e-9)
