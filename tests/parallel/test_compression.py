"""What the communication hooks do to a gradient: rounding, low rank, and the same on every rank."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.checkpoint.weights import digest
from lockstep.parallel.compression import PLAIN_STEPS
from lockstep.parallel.strategy import parallelize
from lockstep.processes.world import World
from lockstep.training.step import TrainStep
from tests.parallel.test_ddp import batch_of
from tests.ranks import run_ranks

STEPS = PLAIN_STEPS + 3


def wide(world: World) -> nn.Module:
    torch.manual_seed(world.rank)
    return nn.Sequential(nn.Flatten(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))


def trained(world: World, compress: str, restart_at: int = -1) -> dict[str, Any]:
    """Weights after some steps, and the rank of the first layer's gradient in each."""
    wrapped = parallelize(model := wide(world), world, compress=compress)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grad_ranks: list[int] = []
    weight = model[1].weight
    optimizer.register_step_pre_hook(lambda *_: grad_ranks.append(_rank(weight.grad)))
    step = TrainStep(wrapped, F.cross_entropy, optimizer)
    for t in range(STEPS):
        if t == restart_at:
            step.sync.restart()
        batch = batch_of(world, 32, accumulate=2, step=t)
        batch.images = batch.images.float()
        step(batch)
    return {"weights": [value for p in model.parameters() for value in p.flatten().tolist()], "ranks": grad_ranks}


def _rank(gradient: torch.Tensor) -> int:
    values = torch.linalg.svdvals(gradient.double())
    return int((values > 1e-5 * values[0]).sum())


class Deep(nn.Module):
    """Ten matrices of a megabyte, so several buckets; a batch norm; and a matrix whose gradient is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(50, 512)
        self.norm = nn.BatchNorm1d(512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(10))
        self.late = nn.Linear(512, 64)
        self.last = nn.Linear(512, 3)
        self.gate = nn.Buffer(torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x.flatten(1))))
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.last(x) + self.gate * self.late(x).mean(1, keepdim=True)


def deep(world: World, rank: int, opened_at: int, unused: bool) -> dict[str, Any]:
    """Weights' digest, loss and the late matrix's gradient norms of some steps on a model of several buckets."""
    torch.manual_seed(0)
    model = Deep()
    wrapped = parallelize(model, world, compress=f"powersgd:{rank}", find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    norms: list[float] = []
    weight = model.late.weight
    optimizer.register_step_pre_hook(lambda *_: norms.append(float(weight.grad.norm())))
    step = TrainStep(wrapped, F.cross_entropy, optimizer, find_unused_parameters=unused)
    for t in range(STEPS + 3):
        model.gate.fill_(t >= opened_at)
        batch = batch_of(world, 32, step=t)
        batch.images = batch.images.float()
        step(batch)
    return {
        "digest": digest(model),
        "norms": norms,
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
    }


def all_deep(world: World) -> list[dict[str, Any]]:
    return [deep(world, rank, PLAIN_STEPS + 2, unused) for rank, unused in ((1, False), (2, True), (4, False))]


def everything(world: World) -> dict[str, dict[str, Any]]:
    kinds = ("none", "fp16", "bf16", "powersgd:1", "powersgd:2")
    return {kind: trained(world, kind) for kind in kinds} | {"again": trained(world, "powersgd:1", PLAIN_STEPS + 1)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(everything, 2)


@pytest.mark.parametrize(("kind", "error"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_the_bytes_round_the_gradient_and_no_more(ranks: list[dict[str, Any]], kind: str, error: float) -> None:
    plain, ours = ranks[0]["none"]["weights"], ranks[0][kind]["weights"]
    assert 0 < max(abs(a - b) for a, b in zip(plain, ours, strict=True)) < error
    assert ours == ranks[1][kind]["weights"]


@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_sends_a_gradient_of_the_rank_asked_for(ranks: list[dict[str, Any]], rank: int) -> None:
    found = ranks[0][f"powersgd:{rank}"]
    assert all(full > 2 for full in found["ranks"][:PLAIN_STEPS])
    assert found["ranks"][PLAIN_STEPS:] == [rank] * (STEPS - PLAIN_STEPS)
    assert found["weights"] == ranks[1][f"powersgd:{rank}"]["weights"]


@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_powersgd_on_several_buckets_beside_other_collectives(n: int) -> None:
    """Each bucket sends three times, from callbacks: nothing else, the next bucket neither, may come between."""
    ranks = run_ranks(all_deep, n, timeout=120)
    for of_kind in zip(*ranks, strict=True):
        assert len({found["digest"] for found in of_kind}) == 1, "the ranks' weights differ"
        for found in of_kind:
            assert found["finite"], "a gradient of zeros became NaN"
            assert found["norms"][: PLAIN_STEPS + 2] == [0.0] * (PLAIN_STEPS + 2)
            assert all(norm > 0 for norm in found["norms"][PLAIN_STEPS + 2 :]), "a matrix once zero never moves again"


def test_other_weights_make_powersgd_begin_again(ranks: list[dict[str, Any]]) -> None:
    assert [rank > 1 for rank in ranks[0]["again"]["ranks"][PLAIN_STEPS:]] == [False, True, True]


def test_one_process_has_nothing_to_send() -> None:
    world = World.single()
    model = wide(world)
    assert parallelize(model, world, compress="powersgd:1") is model
