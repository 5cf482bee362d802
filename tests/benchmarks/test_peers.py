"""The sides of the benchmarks train the same, and the benchmarks run, at tiny sizes; peers where they are installed."""

import importlib
import os
import sys
from dataclasses import replace
from itertools import pairwise

import features
import numpy as np
import overhead
import pytest
import throughput
import torch
from peers import NEEDS, client
from peers.client import Peer, available, distance
from peers.task import Task, make_model, shares, tensor_batches

from lockstep import Order, World
from lockstep.training import loop
from lockstep.watch.journal import Journal

PEERS = os.environ.get("LOCKSTEP_PEERS_PYTHON", sys.executable)


def state(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def trained(side: str, task: Task, steps: int) -> dict[str, np.ndarray]:
    built = importlib.import_module(f"peers.{side}").build(task)
    assert built.run(steps) > 0
    return state(built.model)


@pytest.mark.parametrize(
    ("task", "side", "steps"),
    [
        (Task("linear", 8, plain=True), "lockstep", 20),
        (Task("linear", 8, plain=True), "fit", 5000),
        (Task("mnist", 20, "loader", data_dir="made", plain=True), "lockstep", 3),
        (Task("mnist", 20, "loader", data_dir="made", plain=True), "tutorial", 3),
        (Task("cifar10", 8, "loader", data_dir="made", plain=True), "lockstep", 2),
        # it rounds the inputs otherwise, and each step makes six times as much of that
        (Task("cifar10", 8, "loader", data_dir="made", plain=True), "tutorial", 1),
    ],
)
def test_a_side_trains_as_the_raw_loop(task: Task, side: str, steps: int) -> None:
    start = state(make_model(task))
    raw = trained("raw", replace(task, data="tensors"), steps)
    assert distance(trained(side, task, steps), raw, start) <= 1e-3
    more = trained("raw", replace(task, data="tensors"), steps + 1)
    assert distance(more, raw, start) > 1e-3 or task.net == "linear"  # one step more would be seen


def test_the_order_is_lockstep_s_and_the_timed_task_draws() -> None:
    task = Task("cifar10", 8, data_dir="made")
    order = Order(2000, 8, seed=0)
    assert all((a == b).all() for a, b in zip(shares(task), order.steps(0), strict=True))
    drawn, plain = (next(tensor_batches(replace(task, plain=p))) for p in (False, True))
    assert torch.equal(drawn[1], plain[1])
    assert not torch.equal(drawn[0], plain[0])


def test_ranks_share_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shares(Task("mnist", 20, data_dir="made"))
    parts = []
    for rank in (0, 1):
        monkeypatch.setattr("peers.task.RANK", rank)
        shares.cache_clear()
        parts.append(shares(Task("mnist", 20, data_dir="made", ranks=2)))
    shares.cache_clear()
    assert all((np.concatenate(pair) == ids).all() for *pair, ids in zip(*parts, whole, strict=True))


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(NEEDS, "nobody", "a_package_that_nobody_has")
    assert available(sys.executable, {"raw": "raw", "other": "nobody"}) == ["raw"]
    assert "not installed (benchmarks/peers/requirements.txt): other" in capsys.readouterr().out


def test_a_side_that_fails_says_why() -> None:
    peer = Peer("torn", "no_such_module", Task("linear", 8), sys.executable, 0)
    try:
        with pytest.raises(RuntimeError, match=r"torn failed:(.|\n)*No module named 'peers.no_such_module'"):
            peer.ready()
    finally:
        peer.close()


@pytest.mark.slow
def test_throughput_at_a_tiny_size() -> None:
    found = throughput.measure("mnist 1x1 fp32", ["raw", "lockstep"], sys.executable, 2, 0.01, 2, "made")
    assert found["lockstep"]["weights_apart"] <= 1e-3
    assert found["lockstep"]["lockstep_over"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert found["raw"]["idle_cores"] <= client._IDLE
    ratios, rates, apart = throughput.tables({"mnist 1x1 fp32": found})
    assert [line[0] for line in ratios["rows"]] == ["raw", "noise floor: raw over raw"]
    assert [line[0] for line in rates["rows"]] == [line[0] for line in apart["rows"]] == list(found)


@pytest.mark.slow
def test_overhead_at_a_tiny_size() -> None:
    made = overhead.measure(["raw", "TrainStep"], sys.executable, 2, steps=20)
    assert [line[0] for line in made["tables"][0]["rows"]] == ["raw", "TrainStep"]
    assert made["sides"]["TrainStep"]["weights_apart"] <= 1e-3


def test_features_at_a_tiny_size() -> None:
    made = features.measure("made", rounds=1, steps=2)
    assert [line[0] for line in made["tables"][0]["rows"]] == list(features.SIDES)
    assert all(side["ms_per_step"] > 0 for side in made["sides"].values())


def test_off_writes_no_step_record_and_on_does(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    monkeypatch.setattr(Journal, "write", lambda self, record: kinds.append(record["kind"]))
    config, log = features.configured(Task("mnist", 64, data_dir="made"), 2, "0"), loop.log
    assert features.side(config, World.single(), logged=False)() > 0
    assert "step" not in kinds
    assert loop.log is log
    assert features.side(config, World.single(), logged=True)() > 0
    assert "step" in kinds


@pytest.mark.integration
def test_installed_peers_train_the_same_on_two_processes() -> None:
    sides = available(PEERS, {name: module for name, (module, _) in throughput.SIDES.items()})
    found = throughput.measure("mnist 2x1 bf16", sides, PEERS, 2, 0.01, 2, "made")
    assert {name for name in found if found[name]["weights_apart"] is None} <= {"raw", *throughput.UNORDERED}
    for a, b in pairwise(found):
        assert found[a]["steps"] == found[b]["steps"]


@pytest.mark.integration
def test_overhead_of_installed_peers() -> None:
    sides = available(PEERS, {name: module for name, (module, _) in overhead.SIDES.items()})
    made = overhead.measure(sides, PEERS, 2, steps=50)
    assert [line[0] for line in made["tables"][0]["rows"]] == sides
