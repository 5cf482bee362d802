"""The traps of DistributedDataParallel, each shown to be closed."""

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lockstep.data.loaders import Batch
from lockstep.data.order import Shard, micro_batches
from lockstep.distributed.world import World
from lockstep.parallel.buffers import average_buffers, put_together
from lockstep.parallel.strategy import parallelize, sync_of
from lockstep.parallel.sync import GradientSync
from lockstep.training.step import TrainStep
from tests.ranks import run_ranks

SINGLE = World.single()


def batch_of(world: World, n: int, accumulate: int = 1, step: int = 0) -> Batch:
    """This rank's part of a global batch of n images [2, 5, 5] in float64, a function of n and step."""
    generator = torch.Generator().manual_seed(100 * step + n)
    images = torch.randn(n, 2, 5, 5, generator=generator, dtype=torch.float64)
    shards = micro_batches(n, accumulate, world)
    rows = np.concatenate([np.arange(n)[shard.rows] for shard in shards])
    return Batch(images[rows], torch.from_numpy(rows % 3), shards, np.arange(n), 0, step, step * n)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 3)
    ).double()


def state(model: nn.Module) -> dict[str, list[float]]:
    return {name.removeprefix("module."): value.flatten().tolist() for name, value in model.state_dict().items()}


def train(world: World, model: nn.Module, sizes: list[int], accumulate: int = 1) -> None:
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for t, n in enumerate(sizes):
        step(batch_of(world, n, accumulate, t))


class Counter:
    """Counts DDP's all-reduces, and does what they did."""

    def __init__(self) -> None:
        self.calls = 0

    def hook(self, group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.calls += 1
        return default_hooks.allreduce_hook(group, bucket)


def reductions(world: World) -> dict[str, Any]:
    """How often gradients travel in four steps of three micro-batches, and what a forward outside of no_sync does."""
    counted = Counter()
    model = parallelize(network(), world, batch_norm="local")
    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(None, counted.hook)
    train(world, model, [8] * 4, accumulate=3)
    ours = counted.calls

    counted = Counter()
    trap = parallelize(network(), world, batch_norm="local")
    trap.register_comm_hook(None, counted.hook)
    images = batch_of(world, 8).images
    for _ in range(3):
        outputs = trap(images)  # the trap: DDP decides here, not in the backward pass
        with trap.no_sync():
            outputs.sum().backward()
    return {"ours": ours, "trap": counted.calls}


def empty_share_and_plain_batch_norm(world: World) -> dict[str, Any]:
    """All samples but one on rank 0 in two steps of four: the others' dummies must leave no trace."""
    model = parallelize(network(), world, batch_norm="local")
    train(world, model, [6, 1, 6, 1])
    before = state(model)
    average_buffers(model, world.size)
    only = parallelize(network(), world, batch_norm="local")
    train(world, only, [1, 1])  # rank 0 has every sample of both: one process exactly
    return {"before": before, "after": state(model), "only": state(only)}


def initial(world: World) -> dict[str, list[float]]:
    """A model that each rank built differently."""
    model = network(seed=world.rank)
    model.register_buffer("projection", torch.full((2,), float(world.rank)))
    return state(parallelize(model, world, batch_norm="local"))


def forwards(world: World) -> int:
    """Forwards of one rank alone: where they held a collective, the rank would wait for ever; how many were tracked."""
    model = parallelize(network(), world, batch_norm="local")
    images = torch.zeros(2, 2, 5, 5, dtype=torch.float64)
    model.eval()
    for _ in range(world.rank):
        model(images)
    model.train()
    with torch.no_grad():
        for _ in range(world.rank):
            model(images)
    return int(model.module[1].num_batches_tracked)


def mean_of_means(world: World) -> list[float]:
    """What DDP makes of each rank's own mean loss where shares are uneven."""
    model = parallelize(nn.Linear(50, 3).double(), world)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    batch = batch_of(world, 5)
    F.cross_entropy(model(batch.images.flatten(1)), batch.labels).backward()
    found: list[float] = model.module.bias.grad.tolist()
    return found


def compressed(world: World) -> dict[str, list[float]]:
    """The weights after some steps whose gradients travel in another type."""
    found = {}
    for kind in ("none", "fp16", "bf16"):
        model = network().float()
        step = TrainStep(
            parallelize(model, world, compress=kind), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)
        )
        for t in range(8):
            batch = batch_of(world, 32, accumulate=2, step=t)
            batch.images = batch.images.float()
            step(batch)
        found[kind] = [value for p in model.parameters() for value in p.flatten().tolist()]
    return found


def everything(world: World) -> dict[str, Any]:
    return {
        "reductions": reductions(world),
        "empty": empty_share_and_plain_batch_norm(world),
        "initial": initial(world),
        "forwards": forwards(world),
        "mean of means": mean_of_means(world),
        "compressed": compressed(world),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, 3)


def test_gradients_travel_once_a_step_and_no_sync_covers_the_forward(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["reductions"]["ours"] == 4
        assert rank["reductions"]["trap"] == 3, "a forward outside of no_sync must be seen to cost"


def test_a_rank_with_an_empty_share_leaves_no_trace_in_plain_batch_norm(ranks: list[dict[str, Any]]) -> None:
    # two steps had samples for all, two for rank 0 alone
    tracked = [rank["empty"]["before"]["1.num_batches_tracked"] for rank in ranks]
    assert tracked == [[4], *[[2]] * (len(ranks) - 1)]
    alone = network()
    train(SINGLE, alone, [1, 1])
    for rank in ranks:
        assert all(np.isfinite(values).all() for values in rank["empty"]["before"].values())
        assert rank["empty"]["after"] == ranks[0]["empty"]["after"]
        for name, values in rank["empty"]["only"].items():
            if not name.startswith("1.running") and "tracked" not in name:
                np.testing.assert_allclose(values, state(alone)[name], rtol=0, atol=1e-13)
    assert ranks[0]["empty"]["only"]["1.running_var"] == pytest.approx(state(alone)["1.running_var"], abs=1e-14)


def test_a_place_in_a_ring_falls_back_to_its_start() -> None:
    before, counts = torch.tensor([[64]]), torch.tensor([[16], [16]])
    joined, added = put_together(before, torch.tensor([[80], [80]]), counts)
    assert (joined.item(), bool(added)) == (96, True)
    assert put_together(before, torch.tensor([[0], [0]]), counts, added)[0].item() == 0


def test_all_ranks_start_with_rank_0s_parameters_and_buffers(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["initial"] == {**state(network(seed=0)), "projection": [0.0, 0.0]}


def test_forwards_hold_no_collective_on_buffers(ranks: list[dict[str, Any]]) -> None:
    assert [rank["forwards"] for rank in ranks] == list(range(len(ranks)))


@pytest.mark.parametrize("how", [{"strategy": "ddp"}, {"compress": "bf16"}])
def test_a_world_of_one_is_the_module_itself(how: dict[str, Any]) -> None:
    model = network()
    assert parallelize(model, SINGLE, **how) is model
    sync = sync_of(model)
    assert type(sync) is GradientSync
    assert sync.ranks == 1
    for last in (False, True):
        with sync.around(Shard(0, 0, slice(0, 3), 3), last):
            model(torch.zeros(3, 2, 5, 5, dtype=torch.float64)).sum().backward()
    sync.finish()


def _waits(world: World, late_s: float) -> list[float | None]:
    """Milliseconds that this rank waited per step, where the last rank is late for each backward pass; then not."""
    model = parallelize(network(), world, batch_norm="local")
    sync = sync_of(model)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), sync=sync)
    waits = []
    for late in (late_s, 0.0):
        for t in range(5):
            time.sleep(late if world.rank == world.size - 1 else 0)
            step(batch_of(world, 4, step=t))
        step(batch_of(world, 4))  # DDP adds a step up when the next one begins
        waits.append(sync.waited_ms())
    return waits


def test_the_wait_for_a_late_rank_is_seen_on_the_others() -> None:
    (first, then), (last, _) = run_ranks(_waits, 2, 0.25)
    assert first >= 125 > last
    assert then < 0.4 * first, "steps of an earlier window still count"
    assert sync_of(network()).waited_ms() == 0.0


def test_a_mean_of_means_would_not_be_the_batch_mean(ranks: list[dict[str, Any]]) -> None:
    labels = torch.arange(5) % 3
    right = (torch.zeros(5, 3).softmax(1) - F.one_hot(labels, 3)).mean(0)
    assert np.abs(np.array(ranks[0]["mean of means"]) - right.numpy()).max() > 0.01


@pytest.mark.parametrize(("kind", "error"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_the_bytes_round_the_gradient_and_no_more(ranks: list[dict[str, Any]], kind: str, error: float) -> None:
    plain, *ours = ranks[0]["compressed"]["none"], *(rank["compressed"][kind] for rank in ranks)
    assert 1e-6 < max(abs(a - b) for a, b in zip(plain, ours[0], strict=True)) < error
    assert ours == ours[:1] * 3, "rounded alike on every rank"
