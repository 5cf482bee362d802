"""Whole runs under the other strategies: checkpoints that pass from one to another, and steps taken alone."""

import dataclasses
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import nn

from lockstep.config import CommConfig, Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery, Strategy
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training import summary
from tests.journals import read
from tests.parallel.test_sharded import blocks
from tests.ranks import run_ranks
from tests.training.test_resume import all_of, end_of, trained


def without_dropout(in_channels: int, num_classes: int) -> nn.Module:
    """Dropout draws by micro-batch and rank, so other numbers of processes drop others."""
    model = blocks(in_channels, num_classes)
    model[5] = nn.Identity()
    return model


BASE = Config(
    batch_size=30,
    epochs=3,
    data=DataConfig(dataset="digits", fraction=0.1, crop_padding=1, flip=True),  # 144 samples: 5 steps, the last of 24
    model=ModelConfig(model="tests.training.test_strategies:without_dropout", batch_norm="global"),
    optim=OptimConfig(optimizer="adamw", lr=0.01, ema=0.9),
    execution=Execution(log_every=3, eval_batch_size=200),
    recovery=Recovery(checkpoint_every="4steps", check_every=3, hang_timeout=60),
)
STEPS = 15


def with_strategy(strategy: Strategy, **execution: Any) -> Config:
    return dataclasses.replace(BASE, execution=dataclasses.replace(BASE.execution, strategy=strategy, **execution))


DDP, FSDP = with_strategy("ddp"), with_strategy("fsdp")


def same_run(folder: Path, whole: Path) -> None:
    """Completed, with the same samples and, but for rounding, the same weights and moving average."""
    end, other = end_of(folder), end_of(whole)
    assert (end["status"], end["steps"]) == ("completed", STEPS)
    assert end["ledger_sha256"] == other["ledger_sha256"]
    assert end["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert len(end["weights_sha256"]) == 64
    ours, theirs = (load_file(f / "weights" / "final.safetensors") for f in (folder, whole))
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, atol=2e-4, rtol=2e-3, err_msg=name)


@pytest.mark.slow
def test_a_checkpoint_passes_between_strategies_and_numbers_of_processes(tmp_path: Path) -> None:
    whole, there, back = (str(tmp_path / name) for name in ("whole", "there", "back"))
    run_ranks(all_of, 2, [(DDP, whole), (DDP, there, 6), (FSDP, back, 7)], timeout=120)
    run_ranks(all_named, 3, [(FSDP, there), (DDP, back, 11)], timeout=120)
    run_ranks(all_of, 2, [(FSDP, back)], timeout=120)
    for folder in (there, back):
        same_run(Path(folder), Path(whole))
    begun = [record for record in read(Path(back) / "journal.jsonl") if record["kind"] == "run"]
    assert [record["resumed_from"] for record in begun] == [0, 7, 11]
    assert [len(record["devices"]) for record in begun] == [2, 3, 2]
    assert begun[1]["devices"] == ["device 0", "device 1", "device 2"]


def all_named(world: World, jobs: list[tuple[Any, ...]]) -> list[int]:
    """`all_of`, where each rank's device has another name."""
    with mock.patch.object(summary, "device_name", return_value=f"device {world.rank}"):
        return all_of(world, jobs)


def test_passing_through_fsdp_changes_no_bit(tmp_path: Path) -> None:
    """A checkpoint that is read and written again at once, by FSDP on three, by one process: the same tensors."""
    trained(World.single(), DDP, str(tmp_path / "a"), 8)
    first = tmp_path / "a" / "checkpoints" / "step-000000008"
    tensors = {name: load_file(first / f"{name}.safetensors") for name in ("model", "optimizer", "ema")}
    again = dataclasses.replace(FSDP, recovery=dataclasses.replace(BASE.recovery, resume=str(first)))
    run_ranks(saved_again, 3, again, str(tmp_path / "b"), timeout=120)
    second = tmp_path / "b" / "checkpoints" / "step-000000008"
    for name, expected in tensors.items():
        found = load_file(second / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], expected[key]) for key in expected), name


def saved_again(world: World, config: Config, folder: str) -> None:
    from lockstep.training.assemble import assemble
    from lockstep.training.session import session

    with session(config, world, assemble(config, world), Path(folder)) as live:
        live.checkpoint()
        live.flush()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exact": 4, "execution": Execution(strategy="fsdp")}, "--exact 4 with --strategy fsdp"),
        ({"exact": 4, "comm": CommConfig(compress="bf16")}, "--exact 4 with --compress bf16"),
        ({"comm": CommConfig("bf16"), "execution": Execution(strategy="fsdp")}, "--compress bf16 with --strategy fsdp"),
        ({"optim": OptimConfig("timm:muon"), "execution": Execution(strategy="fsdp")}, "norms of whole parameters"),
    ],
)
def test_what_does_not_go_together_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CommConfig(cast(Any, "powersgd:4")), "unknown compress 'powersgd:4'"),
        (lambda: Execution(threads=-1), "--threads -1"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
