"""Ranks that one process computes take the steps that DDP takes on two processes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ranks
from lockstep.distributed.world import World
from tests.ranks import run_ranks

TWO = ranks.Setup(ranks=2, batch=33, epochs=1)
SETUPS = {
    "equal shares": replace(TWO, batch=32, drop_last=True, rank_means=True),
    "uneven shares": replace(TWO, rank_means=True),
    "weighted classes": replace(TWO, class_weights=True, rank_means=True),
    "local batch norm": replace(TWO, norm="local", rank_means=True),
}


class Net(nn.Module):
    """The network of ranks.py as a module."""

    def __init__(self, setup: ranks.Setup) -> None:
        super().__init__()
        first, bias, second, last, *_ = ranks._weights(0)
        self.first, self.norm, self.second = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)
        if setup.norm == "none":
            self.norm = nn.Identity()  # type: ignore[assignment]
        with torch.no_grad():
            for mine, given in zip(
                (self.first.weight, self.first.bias, self.second.weight, self.second.bias),
                (first, bias, second, last),
                strict=True,
            ):
                mine.copy_(given)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.norm(self.first(images)).relu())


def by_ddp(world: World, setup: ranks.Setup) -> list[float]:
    """The weights of the two layers after an epoch of a plain loop, each rank with the mean over its own share."""
    torch.set_default_dtype(torch.float64)
    ranks.IMAGES = ranks.IMAGES.double()
    model = DistributedDataParallel(Net(setup))
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.lr, momentum=0.9)
    steps = ranks.order(setup, 0, 0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(steps))
    for shares in steps:
        ids = shares[world.rank]
        optimizer.zero_grad()
        outputs = model(ranks._normalised(ranks.IMAGES[ids]).flatten(1))
        F.cross_entropy(outputs, ranks.LABELS[ids], weight=ranks._class_weights(setup)).backward()
        optimizer.step()
        schedule.step()
    net: Any = model.module
    parts = (net.first.weight, net.first.bias, net.second.weight, net.second.bias)
    return torch.cat([part.detach().flatten() for part in parts]).tolist()


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ranks, "IMAGES", ranks.IMAGES.double())
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def all_by_ddp(world: World) -> list[list[float]]:
    return [by_ddp(world, setup) for setup in SETUPS.values()]


@pytest.mark.usefixtures("doubles")
def test_two_ranks_are_what_ddp_computes() -> None:
    found, _ = run_ranks(all_by_ddp, 2, timeout=120)
    for name, theirs in zip(SETUPS, found, strict=True):
        ours = ranks.train(SETUPS[name], 0).weights[: len(theirs)]
        assert (ours - torch.tensor(theirs)).abs().max() < 1e-12, name


@pytest.mark.usefixtures("doubles")
def test_the_number_of_ranks_enters_no_right_training() -> None:
    one, three = (ranks.train(replace(TWO, ranks=n, norm="global", dropout="own", shift="own"), 0) for n in (1, 3))
    assert (one.weights - three.weights).abs().max() < 1e-12
    wrong = ranks.train(replace(TWO, ranks=3, norm="local"), 0)
    assert (one.weights - wrong.weights).abs().max() > 1e-3


def test_who_gets_which_samples() -> None:
    setup = replace(TWO, batch=64, ranks=8)
    first, second = ranks.order(setup, 0, 0), ranks.order(setup, 0, 1)
    assert sorted(torch.cat([share for shares in first for share in shares]).tolist()) == list(range(ranks.TRAIN))
    assert [len(share) for share in first[-1]] == [1] * 4 + [0] * 4
    assert not torch.equal(first[0][0], second[0][0])
    assert torch.equal(first[0][0], ranks.order(replace(setup, set_epoch=False), 0, 1)[0][0])
    assert sum(len(share) for shares in ranks.order(replace(setup, pad=True), 0, 0) for share in shares) == 904
    assert len(ranks.order(replace(setup, drop_last=True), 0, 0)) == 14
