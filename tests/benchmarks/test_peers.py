"""The sides of the benchmarks train the same, and the benchmarks run, at tiny sizes; peers where they are installed."""

import importlib
import os
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import agreement
import features
import numpy as np
import overhead
import pytest
import throughput
import torch
from peers import NEEDS, agree, client
from peers.agree import Comparison
from peers.client import Peer, available
from peers.task import Task, make_model, optim, shares, tensor_batches

from lockstep import Order, World
from lockstep.monitoring.journal import Journal
from lockstep.training import loop

_CIFAR10 = Task("cifar10", 8, "loader", data_dir="made", plain=True)
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
        pytest.param(_CIFAR10, "lockstep", 2, marks=pytest.mark.slow),
        pytest.param(_CIFAR10, "tutorial", 2, marks=pytest.mark.slow),
    ],
)
def test_a_side_trains_as_the_raw_loop(task: Task, side: str, steps: int) -> None:
    task = replace(task, precision="fp64")
    raw = replace(task, data="tensors")
    found = {"raw": trained("raw", raw, steps), side: trained(side, task, steps)}
    compared = Comparison(0, steps_in_float64=steps)
    assert agree.apart(raw, found, "fp64", compared)[side] <= 1e-12
    found["more"] = trained("raw", raw, steps + 1)  # one step more would be seen
    with pytest.raises(RuntimeError, match=rf"other weights than raw after {steps} steps in fp64: \{{'more': "):
        agree.apart(raw, found, "fp64", compared)


@pytest.mark.parametrize("fault", ["rate", "decay", "order"])
def test_a_small_fault_of_a_side_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tolerance of 1 % took for rounding."""
    task = Task("mnist", 20, data_dir="made", plain=True, precision="fp64")
    right, settings = trained("raw", task, 3), optim(task)
    if fault == "order":
        ids = shares(task)
        swapped = [ids[0], ids[1], np.concatenate([ids[3][:1], ids[2][1:]])]
        monkeypatch.setattr("peers.task.shares", lambda _: swapped)
    else:
        lr, decay = (settings.lr * (1 + 1e-7), 0.0) if fault == "rate" else (settings.lr, 1e-7)
        wrong = partial(torch.optim.Adadelta, lr=lr, weight_decay=decay)
        monkeypatch.setattr("peers.raw.make_optimizer", lambda _, model: wrong(model.parameters()))
    with pytest.raises(RuntimeError, match="'wrong': "):
        agree.apart(task, {"raw": right, "wrong": trained("raw", task, 3)}, "fp64", Comparison(0))


def test_images_normalised_otherwise_are_refused() -> None:
    task = Task("mnist", 20, data_dir="made", plain=True, precision="fp64")
    model, (images, _) = make_model(task), next(tensor_batches(task))
    model(images)
    with pytest.raises(RuntimeError, match="is not an image of 8 bits"):
        model(images * 1.01)


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


@pytest.mark.slow
def test_a_side_that_fails_says_why() -> None:
    peer = Peer("torn", "no_such_module", Task("linear", 8), sys.executable, {})
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
    assert found["lockstep"]["apart_in_float64"] <= 1e-12
    ratios, rates, apart = throughput.tables({"mnist 1x1 fp32": found})
    assert [line[0] for line in ratios["rows"]] == ["raw", "noise floor: raw over raw"]
    assert [line[0] for line in rates["rows"]] == [line[0] for line in apart["rows"]] == list(found)


@pytest.mark.slow
def test_agreement_at_a_tiny_size() -> None:
    found = agreement.measure("mnist 1x1 fp32", ["raw", "lockstep", "timm loader"], sys.executable, 2, 2, "made")
    assert found.keys() == {"lockstep"}
    assert found["lockstep"] <= 1e-12
    (made,) = agreement.tables({"mnist 1x1": {"steps": 2, "apart": found}})
    assert [line[0] for line in made["rows"]] == ["lockstep"]
    assert "after 2 steps" in made["notes"][0]


@pytest.mark.slow
def test_overhead_at_a_tiny_size() -> None:
    made = overhead.measure(["raw", "TrainStep"], sys.executable, 2, steps=20)
    assert [line[0] for line in made["tables"][0]["rows"]] == ["raw", "TrainStep"]
    assert made["sides"]["TrainStep"]["weights_apart"] <= 1e-3
    assert made["sides"]["TrainStep"]["apart_in_float64"] <= 1e-12


@pytest.mark.slow
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
