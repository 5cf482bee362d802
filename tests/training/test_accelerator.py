"""Laws of a step on an accelerator, by a pretended one: nothing waits for it, and ranks keep to their own device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import recipe
from lockstep.checkpoint.writer import snapshot
from lockstep.config import Config, SamplesConfig
from lockstep.data.loaders import Batch
from lockstep.data.order import Shard
from lockstep.distributed.world import World
from lockstep.monitoring import desync
from lockstep.parallel.batchnorm import convert_sync_batchnorm
from lockstep.parallel.module_state import all_finite
from lockstep.training.assemble import assemble
from lockstep.training.evaluation import evaluate
from lockstep.training.step import TrainStep
from tests.accelerator import KIND, Seen, pretended
from tests.ranks import run_ranks

RANKS = 2


def _config(**fields: Any) -> Config:
    config = replace(recipe("digits"), batch_size=24, **fields)
    data = replace(config.data, crop_padding=1, flip=True, cutout=2)
    config = replace(config, data=data, optim=replace(config.optim, ema=0.9, clip_norm=1.0))
    return config.with_execution(law="off")  # which waits on the steps that it looks at


def _trained(world: World, seen: Seen, config: Config) -> dict[str, list[str]]:
    """The waits of three steps, of an evaluation, a comparison, a checkpoint and the look at its weights."""
    run, waits = assemble(config, world), dict[str, list[str]]()
    batches = run.train.epoch(0)
    for _ in range(2):  # the first one fills caches
        run.step(next(batches))
        run.ema.update_parameters(run.model)
    work = {
        "step": lambda: [run.step(batch) for batch in [next(batches) for _ in range(3)]],
        "average": lambda: run.ema.update_parameters(run.model),
        "synchronize": run.synchronize,
        "finite": lambda: all_finite([p.detach() for p in run.model.parameters()], world.device),
        "evaluate": lambda: evaluate(run.evaluated, run.val, world, synchronized=True),
        "compare": lambda: desync.check(world, 5, run.model, run.step.optimizer),
        "checkpoint": lambda: snapshot(5, run.model, run.step.optimizer, None, run.ema),
    }
    for name, done in work.items():
        seen.waits.clear()
        done()
        waits[name] = list(seen.waits)
    return waits


def _alone(world: World, seen: Seen) -> dict[str, dict[str, list[str]]]:
    """The ways to train that one process has on its own device; each rank has its part of them."""
    single = World.single(world.device)
    model, optim = _config().model, _config().optim
    configs = {
        "mixed, balanced": _config(samples=SamplesConfig("equal", 2, mixup=0.4, cutmix=1.0)),
        "weighted focal loss": replace(_config(), optim=replace(optim, loss="focal", class_weights="auto")),
        "accumulate": _config(accumulate=2, model=replace(model, batch_norm="global")),
        "groups": _config(model=replace(model, batch_norm="groups:8")),
    }
    return {name: _trained(single, seen, config) for name, config in list(configs.items())[world.rank :: RANKS]}


def _synchronised(world: World, seen: Seen) -> list[str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2)).to(world.device)
    convert_sync_batchnorm(net, world)
    seen.waits.clear()
    net(torch.ones(4 + world.rank, 1, 6, 6, device=world.device)).sum().backward()
    return list(seen.waits)


def _reads(outputs: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, labels)
    loss.item()  # planted
    return loss


def _planted(world: World, seen: Seen) -> tuple[list[str], str]:
    """A loss that reads its value in the step; a tensor of another rank's device."""
    net = nn.Linear(4, 3).to(world.device)
    images, labels = torch.ones(6, 4, device=world.device), torch.zeros(6, dtype=torch.int64, device=world.device)
    step = TrainStep(net, _reads, torch.optim.SGD(net.parameters(), 0.1), law="off")
    step.checks_mean = False  # which reads a step's loss, once
    batch = Batch(images, labels, (Shard(0, 0, slice(0, 6), 6),), np.arange(6), 0, 0, 0)
    seen.waits.clear()
    step(batch)
    with pytest.raises(RuntimeError) as mixed:
        images + torch.ones(6, 4, device=torch.device(KIND, 1 - world.rank))
    return list(seen.waits), str(mixed.value)


def _rank(world: World) -> dict[str, Any]:
    with pretended(RANKS, world.rank) as seen:
        world, found = replace(world, device=torch.device(KIND, world.rank)), dict[str, Any]()
        found["exact over ranks"] = _trained(world, seen, _config(exact=3))
        found["batch norm over ranks"] = _synchronised(world, seen)
        found["collectives"] = [each for each in seen.collectives if each[1] != (str(world.device),)]
        found["count of collectives"] = len(seen.collectives)
        found |= _alone(world, seen)
        found["planted"] = _planted(world, seen)
        return found


def test_no_step_waits_for_the_device_and_ranks_keep_to_their_own() -> None:
    for rank, found in enumerate(run_ranks(_rank, RANKS, timeout=300)):
        (waited,), mixed = found.pop("planted")
        assert waited.startswith("_local_scalar_dense, test_accelerator.py:")
        assert waited.endswith("loss.item()  # planted"), "a wait is named with its place"
        assert f"tensors of {KIND}:0 and {KIND}:1" in mixed
        assert found.pop("batch norm over ranks") == []
        assert found.pop("count of collectives") > 20
        assert set(found.pop("collectives")) <= {("allreduce_", ("cpu",)), ("allgather_", ("cpu",))}, rank
        for name, waits in found.items():
            for part in ("step", "average", "synchronize"):
                assert waits[part] == [], (name, part)
            assert [wait.split(",")[0] for wait in waits["evaluate"]] == ["tolist"], name
            assert len(waits["finite"]) == 1, "before a checkpoint: once for all weights"
