"""The recipes on the real MNIST and CIFAR-10, a small part of an epoch each, through the command itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data.official import CIFAR10, MNIST, Official, load_official
from lockstep.watch.journal import read
from lockstep.world import World
from tests.processes import run_lockstep

pytestmark = pytest.mark.realdata


def _train(folder: Path, data: Path, name: str, *args: str) -> list[dict[str, Any]]:
    """The journal of one run."""
    ended = run_lockstep("train", *args, "--out", name, cwd=folder, env={"LOCKSTEP_DATA": str(data)}, timeout=150)
    assert ended.code == 0, ended.text
    assert not ended.orphans, ended.text
    records = read(folder / name / "journal.jsonl")
    assert records[-1]["status"] == "completed"
    return records


@pytest.mark.parametrize(("official", "train", "test"), [(MNIST, 60_000, 10_000), (CIFAR10, 50_000, 10_000)])
def test_the_official_files_hold_what_their_publishers_say(
    real_data: Path, official: Official, train: int, test: int
) -> None:
    for split, count in zip(load_official(official, real_data, World.single()), (train, test), strict=True):
        assert len(split) == count
        ids = np.arange(0, count, 10)
        images, labels = split.fetch(ids, None)
        assert labels.bincount(minlength=10).min() > 0.08 * len(ids)
        pixels = images.float().div(255).transpose(0, 1).flatten(1)  # [C, pixels]
        assert pixels.mean(1).tolist() == pytest.approx(official.mean, abs=0.006)
        assert pixels.std(1).tolist() == pytest.approx(official.std, abs=0.006)


def test_mnist_learns_the_same_on_1_2_and_3_processes(real_data: Path, tmp_path: Path) -> None:
    flags = ("mnist", "--epochs", "1", "--fraction", "0.05", "--batch-size", "50", "--log-every", "1", "--threads", "1")
    runs = [_train(tmp_path, real_data, f"n{n}", *flags, "--nproc", str(n)) for n in (1, 2, 3)]
    ends = [run[-1] for run in runs]
    assert len({end["ledger_sha256"] for end in ends}) == 1
    assert [(end["steps"], end["samples"], end["processes"]) for end in ends] == [(60, 3000, n) for n in (1, 2, 3)]
    assert [record["count"] for run in runs for record in run if record["kind"] == "eval"] == [10_000] * 3
    # dropout draws differ between the shares, so the weights do; a wrong scale or order would cost far more than this
    assert all(end["top1"] > 0.90 for end in ends), [end["top1"] for end in ends]
    assert max(end["top1"] for end in ends) - min(end["top1"] for end in ends) < 0.03


def test_cifar10_resnet_trains_some_steps_in_bf16_on_two_processes(real_data: Path, tmp_path: Path) -> None:
    flags = ("--epochs", "1", "--fraction", "0.01", "--batch-size", "50", "--lr", "0.02", "--log-every", "1")
    run = _train(tmp_path, real_data, "run", "cifar10", "--nproc", "2", "--precision", "bf16", *flags)
    losses = [record["loss"] for record in run if record["kind"] == "step"]
    assert len(losses) == 10
    assert all(loss < 5 for loss in losses)
    assert next(record["count"] for record in run if record["kind"] == "eval") == 10_000


def test_cifar10_is_learned_by_a_small_network(real_data: Path, tmp_path: Path) -> None:
    flags = ("--model", "lenet5", "--epochs", "2", "--fraction", "0.4", "--optimizer", "adamw", "--lr", "0.002")
    run = _train(tmp_path, real_data, "run", "cifar10", "--nproc", "2", *flags, "--no-nesterov", "--no-channels-last")
    assert run[-1]["top1"] > 0.35
