"""FSDP: parts of parameters, whole tensors on disk, and the same steps as DDP."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.checkpoint import weights
from lockstep.checkpoint.writer import contribute, snapshot
from lockstep.config import Config, DataConfig, ModelConfig, OptimConfig
from lockstep.config.fields import with_values
from lockstep.data.augment import Augment
from lockstep.data.loaders import EvalLoader, reader
from lockstep.data.order import Shard
from lockstep.distributed.world import World
from lockstep.monitoring.desync import contents
from lockstep.parallel.buffers import average_buffers
from lockstep.parallel.fsdp import ShardedSync, is_part, is_sharded, local, part_of, shard, whole
from lockstep.parallel.strategy import parallelize
from lockstep.training.assemble import assemble, loaders
from lockstep.training.evaluation import evaluate
from lockstep.training.outcomes import minus, norms_of
from tests.ranks import run_ranks

BASE = Config(
    batch_size=50,
    data=DataConfig(dataset="digits", fraction=0.15, crop_padding=1, flip=True),
    model=ModelConfig(model="tests.parallel.test_sharded:blocks", batch_norm="global"),
    optim=OptimConfig(lr=0.1, clip_norm=0.5),
)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)  # a bias here has no gradient but noise
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def blocks(in_channels: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 3), Residual(6), Residual(6), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(24, num_classes),
    )  # fmt: skip


def changed(config: Config = BASE, **values: Any) -> Config:
    made: Config = with_values(config, values)
    return made


CASES = {
    "accumulate, channels last, skip": changed(accumulate=3, channels_last=True, on_nonfinite="skip"),
    "adamw, EMA": changed(optimizer="adamw", lr=0.01, ema=0.9),
    "bf16": changed(precision="bf16"),
    "fp16": changed(precision="fp16"),
    "a batch of one": changed(batch_size=3, epochs=1, fraction=7 / 1437),  # 3, 3, 1: ranks without a sample
}


def stepped(world: World, config: Config) -> dict[str, Any]:
    """Weights, moving average and metrics after an epoch."""
    run = assemble(config, world)
    for batch in run.train.epoch(0):
        run.step(batch)
        if run.ema is not None:
            run.ema.update_parameters(run.model)
    metrics = evaluate(run.evaluated, run.val, world, config.precision, tta="mirror")
    state = {name: whole(value).float().tolist() for name, value in run.evaluated.state_dict().items()}
    return {"state": state, "loss": metrics.loss, "top1": metrics.top1, "sharded": is_sharded(run.model)}


def both(world: World) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for name, config in CASES.items():
        fsdp = changed(config, strategy="fsdp")
        found[name] = [stepped(world, config), stepped(world, fsdp)]
    return found


def pieces(world: World, folder: str) -> dict[str, Any]:
    """What this rank holds, and what comes to the disk."""
    torch.manual_seed(world.rank)  # rank 0's weights count
    model = blocks(1, 10).to(memory_format=torch.channels_last)
    shard(model, world)
    torch.manual_seed(0)
    first = {name: whole(value) for name, value in model.state_dict().items()}
    started = all(torch.equal(first[name], value) for name, value in blocks(1, 10).state_dict().items())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    sync, reduced = ShardedSync(model), []
    for _ in range(2):
        for last in (False, True):
            with sync.around(Shard(0, 0, slice(0, 4), 4), last):
                model(torch.randn(4, 1, 8, 8)).sum().backward()
            reduced.append(next(model.parameters()).grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    parameters = list(model.parameters())
    average_buffers(model, world.size)
    path = Path(folder, f"{world.size}.safetensors")
    weights.save(model, path, {}, here=world.rank == 0)
    digest = weights.digest(model)
    if world.rank == 0:
        taken = snapshot(2, model, optimizer)
        plain = blocks(1, 10)
        weights.load(plain, path)
        again = weights.digest(plain)
        shapes = [list(t.shape) for t in taken.tensors["optimizer.safetensors"].values() if t.ndim]
        kept = taken.tensors["model.safetensors"]
        same = all(torch.equal(value, plain.state_dict()[name]) for name, value in kept.items())
    else:
        contribute(model, optimizer)
        again, shapes, same = digest, [], True
    source = torch.arange(240.0).view(10, 24)
    mine = part_of(source, parameters[-2])
    assert started
    assert same
    assert reduced == [False, True] * 2, "gradients travel once a step"
    assert torch.equal(whole(mine), source)
    doubled = [p.detach() * 2 for p in parameters]
    assert torch.allclose(norms_of(map(minus, doubled, parameters)), norms_of(map(whole, parameters))), "of all ranks"
    assert local(mine).numel() < source.numel()
    assert part_of(source, torch.zeros(1)) is source, "of what is not cut"
    assert not any(is_part(value) for _, value in contents(model, optimizer)), "ranks compare no parts"
    held, everything = sum(local(p).numel() for p in parameters), sum(p.numel() for p in parameters)
    return {"held": held, "all": everything, "digests": (digest, again), "shapes": shapes}


def awkward(world: World) -> list[str]:
    """A parameter that is not contiguous; and the optimizers as on a GPU, by fused kernels."""
    assert torch.equal(whole(shard(nn.ParameterList([torch.eye(3, 2).t()]), world)[0]), torch.eye(2, 3))
    taken = []
    with mock.patch("lockstep.training.optimizers._have_kernels", return_value=True):
        for name in ("sgd", "adam", "adamw"):
            run = assemble(changed(optimizer=name, strategy="fsdp"), world)
            before = weights.digest(run.model)
            run.step(next(run.train.epoch(0)))
            if weights.digest(run.model) != before:
                taken.append(name)
    return taken


def evaluated(world: World) -> list[tuple[float, float]]:
    """One model on sets of 1 to 5 chunks: ranks without a chunk, and with one less than others."""
    config = changed(strategy="fsdp")
    run = assemble(config, world)
    images = run.val.images
    results = []
    for size in (400, 180, 120, 100, 80):
        read = reader(images, world.device, "resident", 0)
        loader = EvalLoader(images, Augment(images.mean, images.std), world, read, size)
        metrics = evaluate(run.model, loader, world)
        assert loader.short == (len(list(loader)) < -(-loader.chunks // world.size))
        results.append((metrics.top1, metrics.loss))
    pairs = torch.arange(40.0).double().view(10, 1, 2, 2), torch.arange(10) % 2  # one chunk, of the model's own type
    _, val = loaders((pairs, pairs), world, batch_size=10)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
    metrics = evaluate(parallelize(net, world, strategy="fsdp"), val, world)
    return [*results, (metrics.top1, metrics.loss)]


Found = list[dict[str, Any]]


def everything(world: World, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"cases": both(world), "taken": awkward(world), "evaluated": evaluated(world)}
    return found | {"pieces": pieces(world, folder)}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = str(tmp_path_factory.mktemp("pieces"))
    return run_ranks(everything, request.param, folder, timeout=180, law=request.param == 3)


@pytest.mark.parametrize("name", CASES)
def test_steps_and_evaluation_are_ddps(ranks: Found, name: str) -> None:
    tolerance = 3e-2 if name in ("bf16", "fp16") else 2e-4
    for rank in ranks:
        ddp, fsdp = rank["cases"][name]
        assert (ddp["sharded"], fsdp["sharded"]) == (False, True)
        for key, values in ddp["state"].items():
            np.testing.assert_allclose(fsdp["state"][key], values, atol=tolerance, rtol=tolerance, err_msg=key)
        assert fsdp["loss"] == pytest.approx(ddp["loss"], rel=tolerance)
        assert fsdp["top1"] == pytest.approx(ddp["top1"], abs=0.02)


def test_what_a_gpu_would_do_and_what_cannot_be_cut(ranks: Found) -> None:
    assert [rank["taken"] for rank in ranks] == [["sgd", "adam", "adamw"]] * len(ranks)


@cache
def evaluated_alone() -> list[tuple[float, float]]:
    return evaluated(World.single())


def test_any_number_of_chunks_is_evaluated_on_any_number_of_ranks(ranks: Found) -> None:
    for rank in ranks:
        for ours, expected in zip(rank["evaluated"], evaluated_alone(), strict=True):
            assert ours == pytest.approx(expected, rel=1e-6)


def test_a_rank_holds_a_part_and_the_disk_gets_the_whole(ranks: Found) -> None:
    found = [rank["pieces"] for rank in ranks]
    everything = found[0]["all"]
    assert sum(rank["held"] for rank in found) == everything
    assert all(rank["held"] < 0.6 * everything for rank in found)
    assert len({digest for rank in found for digest in rank["digests"]}) == 1
    names = [list(p.shape) for p in blocks(1, 10).parameters()]
    assert sorted(found[0]["shapes"]) == sorted(names + names)  # two moments each
