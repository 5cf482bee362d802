"""`--batch-norm` over a whole step: one process, several, uneven shares and accumulation compute the same."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import Config, ModelConfig
from lockstep.data.loaders import Batch
from lockstep.data.order import micro_batches
from lockstep.distributed.world import World, shard_of
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import StepBatchNorm
from lockstep.parallel.buffers import average_buffers
from lockstep.parallel.strategy import parallelize
from lockstep.training.step import TrainStep
from tests.ranks import run_ranks

SINGLE = World.single()
CLASSES, STEPS = 5, 10
COUNTS = (16, 16, 2, 14)  # of the batches, in turn: whole groups of 4, fewer samples than ranks, a short last group


class Net(nn.Module):
    """Two batch norms, of which one is used twice, on maps of 4x4 and 1x1; smooth everywhere; float64."""

    center: Tensor

    def __init__(self, spread: bool = False) -> None:
        super().__init__()
        self.spread = spread
        self.conv = nn.Conv2d(2, 6, 3, bias=False)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, CLASSES)
        self.last = nn.BatchNorm1d(CLASSES, momentum=None)
        self.register_buffer("center", torch.zeros(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.spread:
            x = x / x.std(dim=(1, 2, 3), keepdim=True)
            if self.training:
                self.center = 0.5 * self.center + x.detach().mean(dim=(0, 2, 3))
        x = torch.tanh(self.norm(self.conv(x)))
        x = torch.tanh(self.norm(self.twice(x)))
        return self.last(self.head(x.mean(dim=(2, 3))))


def net(spread: bool = False) -> Net:
    torch.manual_seed(1)
    return Net(spread)


def whole(step: int) -> tuple[Tensor, Tensor]:
    count = COUNTS[step % len(COUNTS)]
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(count, 2, 6, 6, generator=generator, dtype=torch.float64) * 2 + 1
    return images, torch.arange(count) % CLASSES


def batch_of(world: World, step: int, accumulate: int = 1, group: int = 1) -> Batch:
    images, labels = whole(step)
    shards = micro_batches(len(images), accumulate, world, group)
    rows = np.concatenate([np.arange(len(images))[shard.rows] for shard in shards])
    return Batch(images[rows], labels[rows], shards, np.arange(len(images)), 0, step, 16 * step)


def trained(world: World, norm: str, accumulate: int = 1, spread: bool = False, steps: int = STEPS) -> dict[str, Any]:
    model = net(spread)
    wrapped = parallelize(model, world, batch_norm=norm)
    step = TrainStep(wrapped, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    group = int(norm.partition(":")[2] or 1)
    losses = [step(batch_of(world, t, accumulate, group)).item() for t in range(steps)]
    average_buffers(model, world.size)
    return {"losses": losses, **{name: value.numpy().copy() for name, value in model.state_dict().items()}}


def assert_agree(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


def one_sample(world: World) -> str:
    """A batch of one sample on a 1x1 map, whatever the number of ranks."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, CLASSES), nn.BatchNorm1d(CLASSES)).double()
    step = TrainStep(parallelize(model, world), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    images, labels = whole(0)
    shards = micro_batches(1, 1, world)
    mine = shards[0].rows
    try:
        step(Batch(images[:1][mine], labels[:1][mine], shards, np.arange(1), 0, 0, 0))
    except UserError as error:
        return error.message
    return "trained"


def everything(world: World) -> dict[str, Any]:
    found: dict[Any, Any] = {
        ("auto", 1): trained(world, "auto", steps=6),
        ("auto", 2): trained(world, "auto", 2, steps=2),
    }
    found |= {("groups", accumulate): trained(world, "groups:4", accumulate) for accumulate in (1, 2, 4)}
    found["spread"] = trained(world, "auto", spread=True, steps=6)
    found["one sample"] = one_sample(world)
    if world.size == 4:
        found["ddp"] = _ddp(world)
    return found


@cache
def alone() -> dict[str, Any]:
    return everything(SINGLE)


@cache
def ranks_of(n: int) -> list[dict[str, Any]]:
    return [alone()] if n == 1 else run_ranks(everything, n, timeout=120)


@pytest.fixture(params=[1, pytest.param(3, marks=pytest.mark.slow), 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return ranks_of(request.param)


def plain(accumulate: int = 1, spread: bool = False, steps: int = 6) -> dict[str, Any]:
    """A loop by hand over micro-batches, with torch's own batch norm."""
    model = net(spread)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for t in range(steps):
        images, labels = whole(t)
        cuts, total = min(accumulate, len(images)), 0.0
        for m in range(cuts):
            part = shard_of(len(images), m, cuts)
            summed = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
            (summed / len(images)).backward()
            total += summed.item() / len(images)
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **{name: value.numpy().copy() for name, value in model.state_dict().items()}}


def test_by_default_batch_norm_is_that_of_the_whole_micro_batch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_agree(rank["auto", 1], plain(), 1e-8)
        assert_agree(rank["auto", 2], plain(2, steps=2), 1e-8)


def test_groups_are_the_same_for_any_accumulation_and_number_of_ranks(ranks: list[dict[str, Any]]) -> None:
    expected = alone()["groups", 1]
    assert np.abs(expected["norm.running_mean"]).max() > 0.01
    for rank in ranks:
        for accumulate in (1, 2, 4):
            assert_agree(rank["groups", accumulate], expected, 1e-12)


def test_dividing_by_the_inputs_spread_works_on_ranks_without_a_sample(ranks: list[dict[str, Any]]) -> None:
    expected = plain(spread=True)
    for rank in ranks:
        found = {name: value for name, value in rank["spread"].items() if name != "center"}
        assert_agree(found, {name: value for name, value in expected.items() if name != "center"}, 1e-8)
        assert np.isfinite(rank["spread"]["center"]).all()


def test_a_batch_without_a_spread_is_refused_on_any_number_of_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "batch norm has a single value for a channel" in rank["one sample"]


def _ddp(world: World) -> dict[str, Any]:
    """torch's own: a plain loop, plain batch norm, equal shares; buffers averaged at the end, as anybody would."""
    model = net()
    ddp = DistributedDataParallel(model)
    ddp.broadcast_buffers = False
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for t in range(STEPS):
        images, labels = whole(4 * t)
        mine = slice(4 * world.rank, 4 * world.rank + 4)
        F.cross_entropy(ddp(images[mine]), labels[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    average_buffers(model, world.size)
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def test_groups_on_one_process_are_torchs_ddp_on_four_with_plain_batch_norm() -> None:
    four = ranks_of(4)[0]["ddp"]
    model = net()
    wrapped = parallelize(model, SINGLE, batch_norm="groups:4")
    step = TrainStep(wrapped, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for t in range(STEPS):
        step(batch_of(SINGLE, 4 * t, group=4))
    assert_agree({name: value.numpy() for name, value in model.state_dict().items()}, four, 1e-12)


def test_pieces_that_cut_a_group_are_refused_with_the_remedy() -> None:
    model = net()
    wrapped = parallelize(model, SINGLE, batch_norm="groups:4")
    step = TrainStep(wrapped, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(
        UserError, match=r'samples 0 to 7 of a batch are not whole groups of 4\n.*batch_norm="groups:4"'
    ):
        step(batch_of(SINGLE, 3, accumulate=2))


def test_the_library_says_when_it_changed_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    parallelize(net(), SINGLE)
    assert capsys.readouterr().out == ""
    model = parallelize(net(), SINGLE, batch_norm="groups:4")
    said = capsys.readouterr().out
    assert "2 batch norm layer(s) of Net now take their statistics over groups of 4 samples" in said
    assert isinstance(model.norm, StepBatchNorm)


def test_a_loop_of_ones_own_is_normalised_group_by_group() -> None:
    """Without TrainStep each forward pass is a batch, whose running statistics move at once."""
    layer: Any = nn.BatchNorm1d(3).double()
    parts: list[Any] = [nn.BatchNorm1d(3).double() for _ in range(3)]
    parallelize(layer, SINGLE, batch_norm="groups:4")
    x = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        y = layer(x)
        expected = torch.cat([part(rows) for part, rows in zip(parts, x.split(4), strict=True)])
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    mean = torch.stack([part.running_var for part in parts]).mean(0)
    torch.testing.assert_close(layer.running_var, mean, rtol=0, atol=1e-14)
    assert int(layer.num_batches_tracked) == 2


def test_what_groups_do_not_go_with() -> None:
    groups = ModelConfig(batch_norm="groups:32")
    with pytest.raises(UserError, match=r"2 group\(s\), which are"):
        Config(model=groups, batch_size=64, accumulate=3)
    with pytest.raises(UserError, match="--exact 4 with --batch-norm groups:32: each slice"):
        Config(model=groups, exact=4)
    with pytest.raises(UserError, match="in groups of 32 is smaller than the 3 processes"):
        Config(model=groups, batch_size=64).require_batch_for(3)
    with pytest.raises(UserError, match="--batch-norm group:32 is not one of auto"):
        ModelConfig(batch_norm="group:32")
