"""A loop of one's own that is stopped and goes on has the weights of one that was never stopped."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep as ls
from lockstep import World
from lockstep.checkpoint.weights import digest
from lockstep.errors import PeerError, UserError
from tests.ranks import run_ranks

EVERY, EPOCHS = 5, 2
ALONE = World.single()


class Keeps(nn.Module):
    """Follows what no state_dict has: a number, a buffer that is not kept, and what is there after the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, list[Tensor]()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1
            self.last = [self.mean + sum(self.last)]
        return x / (1 + self.mean + self.calls / 10) + sum(self.last)


def warming(optimizer: torch.optim.Optimizer) -> None:
    """Gradients that warm up by a count in a hook."""
    taken = 0

    def hook(*_: object) -> None:
        nonlocal taken
        taken += 1
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad *= min(1, taken / 20)

    optimizer.register_step_pre_hook(hook)


def train(world: World, folder: Path, stop: int) -> tuple[int, int, str, dict[str, object]]:
    """Go on for at most `stop` steps; returns the steps before and after, the weights' digest, and what was beside."""
    torch.manual_seed(0)
    loader, _ = ls.loaders("digits", world, batch_size=128, seed=0, workers=0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), Keeps(), nn.Linear(8, 10))
    model = ls.parallelize(net, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warming(optimizer)
    step = ls.TrainStep(model, F.cross_entropy, optimizer)
    checkpoints = ls.Checkpoints(folder / "checkpoints", model, optimizer, world)
    began = done = checkpoints.resume()
    for epoch in range(done // len(loader), EPOCHS):
        for batch in loader.epoch(epoch, done % len(loader)):
            if done - began == stop:
                break
            step(batch)
            done += 1
            if done % EVERY == 0:
                checkpoints.save(done, note="as it was", best=(float(done), None))
    checkpoints.close()
    return began, done, digest(model), checkpoints.state


def stopped_and_gone_on(world: World, folder: Path) -> list[tuple[int, int, str, dict[str, object]]]:
    """A run that is never stopped, one that is, and the rest of that."""
    return [train(world, folder / name, stop) for name, stop in (("whole", 999), ("stopped", 13), ("stopped", 999))]


def refused(world: World, folder: Path) -> str:
    with pytest.raises((UserError, PeerError)) as caught:
        train(world, folder, 1)
    return f"{type(caught.value).__name__}: {caught.value}"


def everything(world: World, folder: Path) -> tuple[list[tuple[int, int, str, dict[str, object]]], str]:
    return stopped_and_gone_on(world, folder), refused(world, folder / "damaged")


def test_it_goes_on_where_it_was_and_where_no_checkpoint_is_good_all_ranks_stop(tmp_path: Path) -> None:
    train(ALONE, tmp_path / "damaged", 10)
    oldest, newest = sorted((tmp_path / "damaged/checkpoints").glob("step-*/model.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    assert train(ALONE, tmp_path / "damaged", 0)[0] == 5, "a damaged one is passed over"
    oldest.write_bytes(b"")
    (first, said), (second, answered) = run_ranks(everything, 2, tmp_path)
    assert said.startswith("UserError: no good checkpoint is left in")
    assert answered.startswith("PeerError: rank 0: no good checkpoint is left in")
    assert [run[:3] for run in first] == [run[:3] for run in second]
    for runs, folder in ((first, tmp_path), (stopped_and_gone_on(ALONE, tmp_path / "alone"), tmp_path / "alone")):
        whole, stopped, (began, done, weights, state) = runs
        assert (whole[:2], whole[3]) == ((0, 24), {})
        assert stopped[:2] == (0, 13)
        assert (began, done) == (10, 24)
        assert weights == whole[2]
        assert (state["note"], state["best"]) == ("as it was", (10.0, None))
        kept = sorted(path.name for path in (folder / "stopped/checkpoints").iterdir() if path.name[0] != ".")
        assert kept == ["step-000000015", "step-000000020"]


def grouped(world: World, folder: Path) -> list[float]:
    """Running means of a batch norm over groups, as they are kept after three steps."""
    torch.manual_seed(0)
    loader, _ = ls.loaders("digits", world, batch_size=128, seed=0, workers=0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    model = ls.parallelize(net, world, batch_norm="groups:32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints, step = ls.Checkpoints(folder, model, optimizer, world), ls.TrainStep(model, F.cross_entropy, optimizer)
    for batch in itertools.islice(loader.epoch(0), 3):
        step(batch)
    checkpoints.save(3)
    checkpoints.close()
    return net[2].running_mean.tolist()


def test_what_is_kept_of_groups_statistics_is_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, two = run_ranks(grouped, 2, tmp_path / "two")
    assert one == two
    np.testing.assert_allclose(one, grouped(ALONE, tmp_path / "one"), rtol=1e-4, atol=1e-6)
    assert "no checkpoint holds" not in "".join(capfd.readouterr())


def test_an_optimizer_without_its_state_is_told(tmp_path: Path) -> None:
    class Bare(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"fast": super().state_dict(), "param_groups": self.param_groups}

    net = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"Bare\.state_dict\(\) has no state\n"):
        ls.Checkpoints(tmp_path, net, Bare(net.parameters(), 0.1), ALONE).save(1)


class Ramped(AveragedModel):
    """Takes every other update, by a number that no state_dict has."""

    updates = 0

    def update_parameters(self, model: nn.Module) -> None:
        self.updates += 1
        if self.updates % 2:
            super().update_parameters(model)


def averaged(folder: Path, stop: int) -> tuple[int, str, str, float]:
    """fp16 and a moving average; the steps before, the digests of weights and average, and the gradients' scale."""
    torch.manual_seed(0)
    loader, _ = ls.loaders("digits", ALONE, batch_size=128, seed=0, workers=0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    average = Ramped(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    step = ls.TrainStep(net, F.cross_entropy, optimizer, precision="fp16")
    assert step.scaler is not None
    step.scaler.set_growth_interval(4)
    checkpoints = ls.Checkpoints(folder, net, optimizer, ALONE, ema=average)
    began = done = checkpoints.resume()
    for batch in loader.epoch(0, done):
        if done - began == stop:
            break
        step(batch)
        average.update_parameters(net)
        done += 1
        checkpoints.save(done)
    checkpoints.close()
    return began, digest(net), digest(average), step.scaler.get_scale()


def test_a_moving_average_and_the_scale_of_fp16_go_on_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = averaged(tmp_path / "whole", 99)
    assert whole[-1] > 2.0**16
    averaged(tmp_path / "stopped", 7)
    (tmp_path / "stopped" / "step-000000007" / "model.safetensors").write_bytes(b"x")
    assert capsys.readouterr().out == ""
    assert averaged(tmp_path / "stopped", 99) == (6, *whole[1:])
    assert "lockstep: note: damaged and set aside: step-000000007 (model.safetensors has" in capsys.readouterr().out


def test_a_scale_that_no_step_would_take_is_told(tmp_path: Path) -> None:
    averaged(tmp_path, 1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(UserError, match=r"(?s)no step with this optimizer takes one yet.*before resume\(\)"):
        ls.Checkpoints(tmp_path, net, torch.optim.AdamW(net.parameters(), lr=3e-3), ALONE).resume()
