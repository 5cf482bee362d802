"""The recipes on the real MNIST and CIFAR-10, a small part of an epoch each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.checkpoint import weights
from lockstep.config import Execution
from lockstep.config.recipes import recipe
from lockstep.data.official import CIFAR10, MNIST, Official, load_official
from lockstep.distributed.world import World
from lockstep.training.assemble import assemble
from lockstep.training.loop import train
from tests.journals import read
from tests.ranks import run_ranks
from tests.subprocesses import run_lockstep

pytestmark = pytest.mark.realdata


@pytest.mark.parametrize(("official", "train_count"), [(MNIST, 60_000), (CIFAR10, 50_000)], ids=["mnist", "cifar10"])
def test_the_official_files_hold_what_their_publishers_say(
    real_data: Path, official: Official, train_count: int
) -> None:
    train_set, test_set = load_official(official, real_data, World.single())
    assert (len(train_set), len(test_set)) == (train_count, 10_000)
    images, labels = train_set.read(np.arange(train_count), None)
    assert labels.bincount().shape == (10,)
    pixels = images.numpy()
    assert (pixels.mean((0, 2, 3)) / 255).tolist() == pytest.approx(official.mean, abs=1e-4)
    assert (pixels.std((0, 2, 3)) / 255).tolist() == pytest.approx(official.std, abs=1e-4)
    assert test_set.read(np.arange(10_000), None)[1].bincount(minlength=10).min() > 800


def _mnist(world: World, data: str, out: str) -> list[dict[str, Any]]:
    config = recipe("mnist")
    config = replace(
        config,
        epochs=1,
        batch_size=50,
        data=replace(config.data, fraction=0.05),
        execution=replace(config.execution, data_dir=data),
    )
    folder = Path(out, f"n{world.size}")
    train(config, world, folder)
    return read(folder / "journal.jsonl") if world.rank == 0 else []


def test_mnist_learns_the_same_on_1_2_and_3_processes(real_data: Path, tmp_path: Path) -> None:
    runs = [run_ranks(_mnist, n, str(real_data), str(tmp_path), timeout=300)[0] for n in (1, 2, 3)]
    ends = [run[-1] for run in runs]
    assert len({end["ledger_sha256"] for end in ends}) == 1
    assert [(end["steps"], end["samples"], end["processes"]) for end in ends] == [(60, 3000, n) for n in (1, 2, 3)]
    assert [record["count"] for run in runs for record in run if record["kind"] == "eval"] == [10_000] * 3
    # dropout draws differ between the shares, so the weights do; a wrong scale or order would cost far more than this
    assert all(end["top1"] > 0.90 for end in ends), [end["top1"] for end in ends]
    assert max(end["top1"] for end in ends) - min(end["top1"] for end in ends) < 0.03


def _cifar10(world: World, data: str) -> tuple[list[float], str]:
    """The cifar10 recipe's first steps in bf16: the losses over all ranks, and the weights' digest."""
    config = recipe("cifar10")  # few samples: a processor without bfloat16 takes half a second for each
    run = assemble(replace(config, batch_size=9, precision="bf16", execution=Execution(data_dir=data)), world)
    losses = []
    for batch, _ in zip(run.train.epoch(0), range(3), strict=False):
        losses.append(float(run.step(batch)))
    for buffer in run.model.buffers():  # local batch norm: statistics are each rank's own
        buffer.zero_()
    return losses, weights.digest(run.model)


def test_cifar10_trains_some_steps_in_bf16_on_two_processes(real_data: Path) -> None:
    (first, digest), (second, other) = run_ranks(_cifar10, 2, str(real_data), timeout=300)
    assert first == second
    assert digest == other
    assert first[0] == pytest.approx(2.5, abs=0.6)  # near ln 10, what a fresh network's ten guesses cost
    assert all(loss < 6 for loss in first)


def test_the_command_learns_cifar10_with_a_small_network(real_data: Path, tmp_path: Path) -> None:
    flags = "--model mlp --epochs 2 --fraction 0.4 --optimizer adamw --lr 0.002 --no-nesterov --no-channels-last"
    args = ("train", "cifar10", "--out", "run", "--nproc", "2", *flags.split())
    ended = run_lockstep(*args, cwd=tmp_path, env={"LOCKSTEP_DATA": str(real_data)}, timeout=150)
    assert ended.code == 0, ended.text
    end = read(tmp_path / "run" / "journal.jsonl")[-1]
    assert end["status"] == "completed"
    assert end["top1"] > 0.35
