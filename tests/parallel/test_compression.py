"""What the communication hooks do to a gradient: they round it, alike on every rank."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.distributed.world import World
from lockstep.parallel.strategy import parallelize
from lockstep.training.step import TrainStep
from tests.parallel.test_ddp import batch_of
from tests.ranks import run_ranks

STEPS = 13


def wide(world: World) -> nn.Module:
    torch.manual_seed(world.rank)
    return nn.Sequential(nn.Flatten(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))


def trained(world: World, compress: str) -> list[float]:
    """The weights after some steps."""
    wrapped = parallelize(model := wide(world), world, compress=compress)
    step = TrainStep(wrapped, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    for t in range(STEPS):
        batch = batch_of(world, 32, accumulate=2, step=t)
        batch.images = batch.images.float()
        step(batch)
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def everything(world: World) -> dict[str, list[float]]:
    return {kind: trained(world, kind) for kind in ("none", "fp16", "bf16")}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[float]]]:
    return run_ranks(everything, 2)


@pytest.mark.parametrize(("kind", "error"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_the_bytes_round_the_gradient_and_no_more(ranks: list[dict[str, Any]], kind: str, error: float) -> None:
    plain, ours = ranks[0]["none"], ranks[0][kind]
    assert 0 < max(abs(a - b) for a, b in zip(plain, ours, strict=True)) < error
    assert ours == ranks[1][kind]


def test_one_process_has_nothing_to_send() -> None:
    world = World.single()
    model = wide(world)
    assert parallelize(model, world, compress="bf16") is model
