"""Interrupted + resumed = uninterrupted: the ledger always, in exact mode the weights, whatever N before and after."""

import dataclasses
import json
import random
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lockstep.config import Config, DataConfig, Execution, LinkConfig, ModelConfig, OptimConfig, Recovery, SamplesConfig
from lockstep.errors import UserError
from lockstep.processes.world import World
from lockstep.training.assemble import assemble
from lockstep.training.control import Agreement, Control
from lockstep.training.loop import train
from lockstep.training.step import TrainStep
from tests.journals import read
from tests.ranks import RankFailed, run_ranks

EXACT = Config(
    batch_size=30,
    exact=4,
    epochs=3,
    data=DataConfig(dataset="digits", fraction=0.1, crop_padding=1, flip=True),  # 144 samples: 5 steps, the last of 24
    model=ModelConfig(model="tests.parallel.test_exact:small_net"),
    optim=OptimConfig(optimizer="adamw", lr=0.01, ema=0.9, warmup_epochs=0.5),
    execution=Execution(log_every=3, eval_batch_size=200),
    recovery=Recovery(checkpoint_every="4steps", check_every=3, hang_timeout=60),
)
AUGMENTED = dataclasses.replace(
    EXACT,
    data=dataclasses.replace(EXACT.data, augment=("randaugment:2,9", "tests.data.test_transforms:own")),
    execution=dataclasses.replace(EXACT.execution, loader="streaming", workers=1),
)
PLAIN = dataclasses.replace(EXACT, exact=0, accumulate=2, optim=OptimConfig(lr=0.05))
MIXED = dataclasses.replace(EXACT, samples=SamplesConfig("equal", 2, mixup=0.4, cutmix=1.0, mix_off_epochs=1))
STREAMING = dataclasses.replace(PLAIN, execution=dataclasses.replace(EXACT.execution, loader="streaming", workers=1))
STEPS = 15


def trained(world: World, config: Config, folder: str, stop_at: int = 0) -> int:
    """`train`, stopped by the agreement of all ranks after `stop_at` steps."""
    if world.rank == 0:
        Path(folder, "weights").mkdir(parents=True, exist_ok=True)
    world.barrier()
    agree = Control.agree

    def stopping(self: Control, steps: int, failed: bool = False, now: bool = False) -> Agreement:
        agreed = agree(self, steps, failed, now)
        return dataclasses.replace(agreed, stop=signal.SIGTERM) if steps == stop_at else agreed

    Control.agree = stopping  # type: ignore[method-assign]
    try:
        return train(config, world, Path(folder)).stop
    finally:
        Control.agree = agree  # type: ignore[method-assign]


def all_of(world: World, jobs: list[tuple[Any, ...]]) -> list[int]:
    return [trained(world, *job) for job in jobs]


def run_jobs(jobs: dict[int, list[tuple[Any, ...]]]) -> None:
    for n, mine in jobs.items():
        run_ranks(all_of, n, mine, timeout=120 + 30 * len(mine))


def end_of(folder: Path) -> dict[str, Any]:
    end = read(folder / "journal.jsonl")[-1]
    assert end["kind"] == "end"
    return end


def check(tmp_path: Path, cases: list[tuple[str, Config, int, int, int]]) -> None:
    """cases: (name, config, N before, stop after so many steps, N after)."""
    configs = {config: tmp_path / f"whole-{i}" for i, config in enumerate(dict.fromkeys(c[1] for c in cases))}
    run_ranks(all_of, 2, [(config, str(folder)) for config, folder in configs.items()], timeout=300)
    before, after = defaultdict(list), defaultdict(list)
    for name, config, n, at, then in cases:
        before[n].append((config, str(tmp_path / name), at))
        after[then].append((config, str(tmp_path / name)))
    run_jobs(before)
    for name, _, _, at, _ in cases:
        end = end_of(tmp_path / name)
        assert (end["status"], end["steps"]) == ("interrupted", at), name
    run_jobs(after)
    for name, config, *_ in cases:
        whole, end = end_of(configs[config]), end_of(tmp_path / name)
        assert end["status"] == "completed", name
        assert end["steps"] == whole["steps"] == STEPS
        assert end["ledger_sha256"] == whole["ledger_sha256"], name
        if config.exact:
            assert end["weights_sha256"] == whole["weights_sha256"], name
            assert (end["top1"], end["loss"]) == (whole["top1"], whole["loss"]), name


def test_resume_at_the_very_next_sample_on_another_number_of_processes(tmp_path: Path) -> None:
    check(
        tmp_path,
        [
            ("first step", EXACT, 1, 1, 3),
            ("middle of an epoch", EXACT, 3, 7, 1),
            ("end of an epoch, before its evaluation", EXACT, 1, 10, 3),
            ("end of the last epoch, before its evaluation", EXACT, 3, STEPS, 1),
            ("plain", PLAIN, 3, 8, 1),
            ("streaming", STREAMING, 1, 6, 3),
            ("mixed", MIXED, 3, 7, 1),
            ("augmented", AUGMENTED, 1, 7, 3),
        ],
    )


def test_an_exact_run_is_not_resumed_where_kernels_round_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(World.single(), EXACT, str(tmp_path), 7)
    monkeypatch.setattr("lockstep.parallel.repeatable.device_name", lambda _: "another one")
    with pytest.raises(UserError, match=r"device: .* -> another one\n.*--override rounding"):
        trained(World.single(), EXACT, str(tmp_path))


@pytest.mark.slow
def test_fifty_random_interruptions(tmp_path: Path) -> None:
    draw = random.Random(0)
    cases = []
    for i in range(50):
        before, after = draw.sample([1, 2, 3, 4], 2)
        config = draw.choice([EXACT, EXACT, PLAIN, STREAMING])
        cases.append((f"case-{i}", config, before, draw.randint(1, STEPS - 1), after))
    check(tmp_path, cases)


def test_another_experiment_is_refused_with_a_diff(tmp_path: Path) -> None:
    config, folder = PLAIN, tmp_path / "run"
    trained(World.single(), config, str(folder), 7)
    hotter = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=0.5))
    with pytest.raises(Exception, match=r"optim.lr: 0.05 -> 0.5\n.*--override optim.lr"):
        trained(World.single(), hotter, str(folder))
    other = dataclasses.replace(config, batch_size=20)
    with pytest.raises(Exception, match=r"batch_size: 30 -> 20\n.*can't change: other samples"):
        trained(World.single(), other, str(folder))
    allowed = dataclasses.replace(hotter, recovery=dataclasses.replace(config.recovery, override=("lr",)))
    trained(World.single(), allowed, str(folder))
    assert end_of(folder)["status"] == "completed"
    assert json.loads((folder / "config.json").read_text())["optim"]["lr"] == 0.5


def poisoned(world: World, config: Config, folder: str, step: int) -> list[int]:
    """Train with one rank's images of one step blown up; returns the steps that were left out."""

    class Spoiled(TrainStep):
        def __call__(self, batch: Any) -> Any:
            if batch.step == step and world.rank == world.size - 1:
                batch.images.fill_(float("nan"))
            return super().__call__(batch)

    def spoiling(*args: Any) -> Any:
        run = assemble(*args)
        run.step.__class__ = Spoiled
        return run

    if world.rank == 0:
        Path(folder, "weights").mkdir(parents=True, exist_ok=True)
    world.barrier()
    with mock.patch("lockstep.training.loop.assemble", spoiling):
        return train(config, world, Path(folder)).state.skipped


def test_a_non_finite_loss_has_one_answer_on_all_ranks(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, model=ModelConfig(model="mlp"))
    with pytest.raises(RankFailed, match=r"non-finite at step 7 on rank\(s\) 1"):
        run_ranks(poisoned, 2, config, str(tmp_path / "stop"), 6)
    back = dataclasses.replace(config, on_nonfinite="rollback")
    assert run_ranks(poisoned, 2, back, str(tmp_path / "back"), 6) == [[6], [6]]
    records = read(tmp_path / "back" / "journal.jsonl")
    faults = [r for r in records if r["kind"] == "fault"]
    assert [(f["fault"], f["step"], f["back_to"]) for f in faults] == [("rollback", 6, 4)]
    assert records[-1]["status"] == "completed"
    assert records[-1]["samples"] == 3 * 144 - 30
    alone = dataclasses.replace(
        back,
        link=LinkConfig(sync_every=3),
        recovery=dataclasses.replace(back.recovery, checkpoint_every="3steps", check_every=3),
    )
    # the batch left out is that of an exchange, which there must be all the same: the ranks are compared after it
    assert run_ranks(poisoned, 2, alone, str(tmp_path / "alone"), 8) == [[8], [8]]
    skip = dataclasses.replace(config, on_nonfinite="skip")
    run_ranks(poisoned, 2, skip, str(tmp_path / "skip"), 6)
    end = end_of(tmp_path / "skip")
    assert end["status"] == "completed"
    assert end["skipped"] == 1
    assert end["ledger_sha256"] == records[-1]["ledger_sha256"]  # both have trained on all but that batch
