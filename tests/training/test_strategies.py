"""Whole runs under the other strategies: checkpoints that pass from one to another, and steps taken alone."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import nn

from lockstep.config import Config, DataConfig, Execution, LinkConfig, ModelConfig, OptimConfig, Recovery, Strategy
from lockstep.errors import UserError
from lockstep.processes.world import World
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


DDP, FSDP, STAGES = with_strategy("ddp"), with_strategy("fsdp"), with_strategy("ddp", model_parallel=2)


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
    whole, there, back, pieces = (str(tmp_path / name) for name in ("whole", "there", "back", "pieces"))
    run_ranks(all_of, 2, [(DDP, whole), (DDP, there, 6), (FSDP, back, 7), (STAGES, pieces, 4)], timeout=120)
    run_ranks(all_named, 3, [(FSDP, there), (DDP, back, 11), (FSDP, pieces, 8)], timeout=120)
    run_ranks(all_of, 2, [(FSDP, back), (STAGES, pieces)], timeout=120)
    for folder in (there, back, pieces):
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
    from lockstep.training.lifetime import session

    if world.rank == 0:
        Path(folder, "weights").mkdir(parents=True)
    world.barrier()
    with session(config, world, assemble(config, world), Path(folder)) as live:
        live.checkpoint()
        live.flush()


LOCAL = dataclasses.replace(
    BASE,
    model=ModelConfig(model="tests.parallel.test_exact:small_net"),
    optim=OptimConfig(lr=0.05),
    recovery=dataclasses.replace(BASE.recovery, checkpoint_every="6steps"),
    link=LinkConfig(sync_every=3),
)
DILOCO = dataclasses.replace(LOCAL, link=LinkConfig(sync_every=3, outer_lr=0.7, outer_momentum=0.9))
ADAMW = dataclasses.replace(LOCAL, optim=OptimConfig(optimizer="adamw", lr=0.01))
PRIVATE = dataclasses.replace(ADAMW, link=dataclasses.replace(DILOCO.link, inner_state="private"))


@pytest.mark.slow
def test_a_resumed_local_run_is_the_one_that_went_through(tmp_path: Path) -> None:
    """Stopped where the ranks have common weights: every third step, and each epoch's end (5, 10)."""
    cases = [
        ("local", LOCAL, 6),
        ("diloco", DILOCO, 9),
        ("diloco, at an epoch's end", DILOCO, 10),
        ("adamw", ADAMW, 12),
        ("private", PRIVATE, 12),
    ]
    run_ranks(all_of, 2, [(config, str(tmp_path / f"{name} whole")) for name, config, _ in cases], timeout=120)
    run_ranks(all_of, 2, [(config, str(tmp_path / name), at) for name, config, at in cases], timeout=120)
    for name, _, at in cases:
        assert (end_of(tmp_path / name)["status"], end_of(tmp_path / name)["steps"]) == ("interrupted", at)
    run_ranks(all_of, 2, [(config, str(tmp_path / name)) for name, config, _ in cases], timeout=120)
    for name, _, _ in cases:
        end, whole = end_of(tmp_path / name), end_of(tmp_path / f"{name} whole")
        for key in ("status", "steps", "ledger_sha256", "weights_sha256", "top1", "loss"):
            assert end[key] == whole[key], (name, key)


def test_local_steps_stop_where_weights_are_common(tmp_path: Path) -> None:
    """Asked to stop after step 7, between two exchanges, the ranks go on to the ninth."""
    run_ranks(asked_to_stop, 2, LOCAL, str(tmp_path), 7, timeout=120)
    assert end_of(tmp_path)["steps"] == 9


def asked_to_stop(world: World, config: Config, folder: str, step: int) -> None:
    import os
    import signal

    from lockstep.parallel.local import LocalSync
    from lockstep.training import control

    control._REACT_S = 0.0  # the ranks agree at every step that they can
    updated = LocalSync.updated

    def ask(self: LocalSync, at: int) -> None:
        if at + 1 == step:
            os.kill(os.getpid(), signal.SIGUSR1)
        updated(self, at)

    LocalSync.updated = ask  # type: ignore[method-assign, assignment]
    trained(world, config, folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"exact": 4, "execution": Execution(strategy="fsdp"), "model": ModelConfig(channels_last=True)},
            "--exact 4 with --strategy fsdp and --channels-last",
        ),
        ({"exact": 4, "execution": Execution(strategy="single")}, "--exact 4 with --strategy single"),
        ({"exact": 4, "execution": Execution(model_parallel=2)}, "--exact 4 with --model-parallel 2"),
        ({"exact": 4, "link": LinkConfig(compress="bf16")}, "--exact 4 with --compress bf16"),
        ({"exact": 4, "link": LinkConfig(sync_every=2)}, "--exact 4 with --sync-every 2"),
        ({"link": LinkConfig("bf16"), "execution": Execution(strategy="fsdp")}, "--compress bf16 with --strategy fsdp"),
        ({"link": LinkConfig("powersgd:1"), "precision": "fp16"}, "--compress powersgd:1 with --precision fp16"),
        ({"link": LinkConfig("powersgd:1"), "on_nonfinite": "skip"}, "with --on-nonfinite skip: what PowerSGD"),
        ({"link": LinkConfig(sync_every=2), "execution": Execution(strategy="fsdp")}, "averages whole models"),
        ({"link": LinkConfig(sync_every=2), "precision": "fp16"}, "--sync-every 2 with --precision fp16"),
        ({"link": LinkConfig(sync_every=2), "on_nonfinite": "skip"}, "--on-nonfinite skip: each process would decide"),
        ({"link": LinkConfig(sync_every=2), "optim": OptimConfig(ema=0.9)}, "--sync-every 2 with --ema 0.9"),
        (
            {"link": LinkConfig(sync_every=2), "model": ModelConfig(batch_norm="global")},
            "with --batch-norm global: that talks",
        ),
        (
            {"link": LinkConfig(sync_every=2), "model": ModelConfig(find_unused_parameters=True)},
            "--sync-every 2 with --find-unused-parameters",
        ),
        (
            {"link": LinkConfig(sync_every=4), "recovery": Recovery(checkpoint_every="10steps")},
            "--checkpoint-every 10steps with --sync-every 4: a checkpoint needs common weights",
        ),
        ({"optim": OptimConfig("muon"), "execution": Execution(strategy="fsdp")}, "Muon orthogonalises whole matrices"),
        (
            {"execution": Execution(model_parallel=2), "model": ModelConfig(compile=True)},
            "--model-parallel 2 with --comp",
        ),
    ],
)
def test_what_does_not_go_together_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinkConfig("powersgd"), "--compress powersgd is unknown"),
        (lambda: LinkConfig("powersgd:0"), "--compress powersgd:0 is unknown"),
        (lambda: LinkConfig(sync_every=0), "--sync-every 0 is not positive"),
        (lambda: LinkConfig(sync_every=2, outer_lr=0.0), "--outer-lr 0.0 is not positive"),
        (lambda: LinkConfig(sync_every=2, outer_momentum=1.0), "not in"),
        (
            lambda: LinkConfig(outer_momentum=0.9),
            "--outer-lr, --outer-momentum and --inner-state belong to --sync-every",
        ),
        (lambda: LinkConfig("bf16", sync_every=2), "weights are averaged, not gradients"),
        (lambda: Execution(model_parallel=0), "--model-parallel 0"),
        (lambda: Execution(strategy="fsdp", model_parallel=2), "both spread one model"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_the_rank_of_powersgd_is_read() -> None:
    assert LinkConfig("powersgd:12").powersgd_rank == 12
    assert LinkConfig("bf16").powersgd_rank == 0
