"""Local SGD: steps alone, then common weights, the same on all ranks and resumable."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.parallel.local import LocalSync, take_own
from lockstep.parallel.strategy import parallelize
from lockstep.processes.world import World
from lockstep.training.step import TrainStep
from tests.parallel.test_ddp import batch_of
from tests.ranks import run_ranks


def plain_network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)).double()


def numbers(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def stepped(world: World, every: int, sizes: list[int], lr: float = 0.1, **options: Any) -> tuple[TrainStep, LocalSync]:
    model = plain_network(seed=world.rank)  # each rank draws its own: rank 0's counts
    momentum = options.pop("momentum", 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    sync = LocalSync(model, world, every, **options)
    step = TrainStep(model, F.cross_entropy, optimizer, sync=sync)
    for t, n in enumerate(sizes):
        step(batch_of(world, n, step=t))
    return step, sync


def every_step_is_ddp(world: World) -> dict[str, list[float]]:
    """With an exchange after each step, plain SGD is DDP, uneven shares included."""
    sizes = [6, 7, 1, 8]
    ours, _ = stepped(world, 1, sizes)
    model = plain_network(seed=0)
    wrapped = parallelize(model, world)
    ddp = TrainStep(wrapped, F.cross_entropy, torch.optim.SGD(wrapped.parameters(), 0.1))
    for t, n in enumerate(sizes):
        ddp(batch_of(world, n, step=t))
    return {"local": numbers(ours.model), "ddp": numbers(model)}


def apart_and_together(world: World) -> dict[str, Any]:
    step, sync = stepped(world, 3, [6] * 5, momentum=0.9)
    apart = numbers(step.model)
    sync.synchronize()
    sync.synchronize()  # nothing left to do
    state = [v.flatten().tolist() for s in step.optimizer.state.values() for v in s.values() if v is not None]
    return {"apart": apart, "together": numbers(step.model), "state": state, "waited": sync.waited_ms()}


def outer(world: World) -> dict[str, list[float]]:
    """Two windows of two steps under an outer Nesterov step, and torch's SGD doing the same to the averages."""
    step, _ = stepped(world, 2, [6] * 4, outer_lr=0.7, outer_momentum=0.9)
    common = plain_network(seed=0)
    reference = torch.optim.SGD(common.parameters(), 0.7, momentum=0.9, nesterov=True)
    for window in range(2):
        alone = plain_network()
        alone.load_state_dict(common.state_dict())
        inner = TrainStep(
            alone, F.cross_entropy, torch.optim.SGD(alone.parameters(), 0.1 * world.size)
        )  # times N, which LocalSync's weights hold
        for t in (2 * window, 2 * window + 1):
            inner(batch_of(world, 6, step=t))
        for p, mine in zip(common.parameters(), alone.parameters(), strict=True):
            p.grad = p.detach() - world.sum(mine.detach().clone()) / world.size
        reference.step()
    return {"ours": numbers(step.model), "reference": numbers(common)}


def private(world: World) -> dict[str, Any]:
    """Weights come together, and each rank's momentum stays its own; a checkpoint's rows give each its own again."""
    step, sync = stepped(world, 3, [6] * 3, momentum=0.9, inner_state="private")
    optimizer = step.optimizer
    own = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    with sync.gathered():
        rows = {p: dict(s) for p, s in optimizer.state.items()} if world.rank == 0 else {}
        told = world.gather([{k: v.tolist() for k, v in s.items()} for s in rows.values()])[0]
    left = {key for s in optimizer.state.values() for key in s}

    def read(kept: bool, world: World) -> list[torch.Tensor]:
        for s, saved in zip(optimizer.state.values(), told, strict=True):
            s.update({key: torch.tensor(value, dtype=torch.float64) for key, value in saved.items()})
        take_own(optimizer, world, kept)
        return [s["momentum_buffer"] for s in optimizer.state.values()]

    again, mean = read(True, world), [world.sum(value.clone()) / world.size for value in own]
    fewer = read(True, dataclasses.replace(world, rank=0, size=world.size + 1))
    return {
        "weights": numbers(step.model),
        "own": own[0].flatten().tolist(),
        "left": left,
        "again": all(torch.equal(a, b) for a, b in zip(again, own, strict=True)),
        "fewer": all(torch.allclose(a, b) for a, b in zip(fewer, mean, strict=True)),
    }


def everything(world: World) -> dict[str, Any]:
    return {
        "every": every_step_is_ddp(world),
        "apart": apart_and_together(world),
        "outer": outer(world),
        "private": private(world),
    }


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(everything, request.param)


def test_an_exchange_after_each_step_is_ddp(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["every"]["local"] == pytest.approx(rank["every"]["ddp"], abs=1e-12)


def test_ranks_go_apart_and_come_together_with_their_optimizers(ranks: list[dict[str, Any]]) -> None:
    first, *others = (rank["apart"] for rank in ranks)
    for other in others:
        assert other["apart"] != first["apart"]
        assert other["together"] == first["together"]
        assert other["state"] == first["state"]
    mean = [sum(values) / len(ranks) for values in zip(*(rank["apart"]["apart"] for rank in ranks), strict=True)]
    assert first["together"] == pytest.approx(mean, abs=1e-12)
    assert first["waited"] > 0


def test_the_outer_step_is_nesterov_sgd_on_the_way_to_the_average(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["outer"]["ours"] == ranks[0]["outer"]["ours"]
        assert rank["outer"]["ours"] == pytest.approx(rank["outer"]["reference"], abs=1e-12)


def test_private_states_stay_apart_and_a_checkpoint_holds_them_all(ranks: list[dict[str, Any]]) -> None:
    first, *others = (rank["private"] for rank in ranks)
    for other in others:
        assert other["weights"] == first["weights"]
        assert other["own"] != first["own"]
    for rank in (first, *others):
        assert rank["left"] == {"momentum_buffer"}
        assert rank["again"]
        assert rank["fewer"]


def test_one_process_takes_steps_as_ever() -> None:
    world = World.single()
    local, sync = stepped(world, 4, [6] * 5)
    model = plain_network()
    alone = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    for t in range(5):
        alone(batch_of(world, 6, step=t))
    assert numbers(local.model) == numbers(model)
    sync.synchronize()
    assert numbers(local.model) == numbers(model)
