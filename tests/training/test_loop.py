"""A run's story as its journal tells it."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from lockstep import recipe
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery
from lockstep.config.fields import with_values
from lockstep.data.loaders import Batch
from lockstep.distributed.world import World
from lockstep.parallel import buffers, sync
from lockstep.training import evaluation
from lockstep.training.assemble import assemble
from lockstep.training.loop import steps, train
from lockstep.training.session import Window
from lockstep.training.state import State
from tests.journals import read
from tests.ranks import run_ranks
from tests.training.test_resume import trained


def journal_of(folder: Path, epochs: int, eval_every: int) -> list[dict[str, Any]]:
    often = {"eval_every": eval_every, "log_every": 2, "checkpoint_every": "0"}
    data = {"fraction": 0.1, "alternate_flip": True}
    config = with_values(recipe("digits"), {"epochs": epochs, "tta": "mirror", **data, **often})
    train(config, World.single(), str(folder))
    return read(folder / "journal.jsonl")


def test_every_so_many_epochs_and_the_last_are_evaluated(tmp_path: Path) -> None:
    weights = set()
    for every, evaluated in (1, [0, 1, 2]), (2, [1, 2]), (9, [2]):
        records = journal_of(tmp_path / str(every), 3, every)
        assert [r["epoch"] for r in records if r["kind"] == "eval"] == evaluated
        steps = [r for r in records if r["kind"] == "step"]
        assert sorted({r["epoch"] for r in steps}) == [0, 1, 2]
        end = records[-1]
        assert (end["status"], end["steps"]) == ("completed", steps[-1]["step"])
        assert end["top1"] == [r["top1"] for r in records if r["kind"] == "eval"][-1]
        assert [r["comm_wait_ms"] for r in steps] == [0.0] * len(steps)
        assert len(end["peak_memory_gib"]) == 1
        assert 0.1 < end["peak_memory_gib"][0] < 24
        weights.add(end["weights_sha256"])
    assert len(weights) == 1, "evaluating more often changes nothing that is learned"


SMALL: Config = with_values(recipe("digits"), {"epochs": 2, "fraction": 160 / 1437, "ema": 0.5})  # of three steps each


def test_a_step_is_loaded_taken_averaged_and_noted_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    run, state, events = assemble(SMALL, World.single()), State(), list[str]()
    assert run.ema is not None
    step, update, advance, synchronize = run.step, run.ema.update_parameters, state.advance, run.step.sync.synchronize

    def noted(what: str, done: object) -> object:
        events.append(what)
        return done

    monkeypatch.setattr(step, "take", lambda batch, take=step.take: noted(f"step {batch.step}", take(batch)))
    monkeypatch.setattr(run.ema, "update_parameters", lambda model: noted("average", update(model)))
    monkeypatch.setattr(state, "advance", lambda *a, **k: noted("state", advance(*a, **k)))
    monkeypatch.setattr(step.sync, "synchronize", lambda: noted("synchronize", synchronize()))
    for number, samples, loss in steps(run, state, lambda batch: events.append(f"loaded {batch.step}")):
        assert loss is not None
        events.append(f"yield {number} of {samples}")
        assert (state.steps, state.samples) == (number + 1, min(160, 64 * (number + 1)))
    expected = []
    for number, samples in enumerate([64, 64, 32]):
        expected += [f"loaded {number}", f"step {number}", "average", "state"]
        expected += [*(["synchronize"] if number == 2 else []), f"yield {number} of {samples}"]
    assert events == expected
    state.epochs += 1
    assert [number for number, _, _ in steps(run, state, lambda batch: None)] == [3, 4, 5]


def test_steps_go_on_within_an_epoch_and_pass_by_what_was_left_out() -> None:
    run, seen = assemble(SMALL, World.single()), list[Batch]()
    state, straight = State(steps=4, samples=224, epochs=1, skipped=[5]), State(steps=4, epochs=1)
    assert run.ema is not None
    before = run.ema.n_averaged.item()
    (four, _, loss), (five, _, none) = steps(run, state, seen.append)
    assert (four, five, none) == (4, 5, None)
    assert loss is not None
    assert [batch.step for batch in seen] == [4, 5]
    assert (state.steps, state.samples) == (6, 224 + 64)
    assert run.ema.n_averaged.item() == before + 1
    for batch in seen:
        straight.advance(batch.all_ids)
    assert straight.ledger != state.ledger, "what was left out leaves its mark"


def test_a_window_counts_the_waits_of_its_own_steps() -> None:
    world = World.single()
    run = assemble(SMALL, world)
    config = with_values(SMALL, {"log_every": 3})
    window, other = Window(world, run, config), Window(world, run, config)
    run.train.wait_ms += 1000.0
    window.restart()
    for number, samples, loss in steps(run, State(), lambda batch: None):
        assert loss is not None
        window.add(number, samples, loss)
        other.add(number, samples, loss)
    assert window.full
    first, second = window.read(), other.read()
    assert second["data_wait_ms"] == pytest.approx(first["data_wait_ms"] + 1000 / 3, abs=2e-3)
    assert first["loss"] == second["loss"]
    assert run.train.wait_ms > 1000
    assert not window.batches


def averaged_buffers(world: World, folder: str) -> dict[str, list[int]]:
    """The steps at which buffers were averaged, in runs with plain batch norm that evaluate and keep now and then."""
    found: dict[str, list[int]] = {}
    base = Config(
        epochs=4,
        batch_size=48,
        data=DataConfig(dataset="digits", fraction=0.1),  # 3 steps an epoch
        model=ModelConfig(model="tests.parallel.test_exact:small_net"),
        optim=OptimConfig(ema=0.5),
        execution=Execution(eval_every=2, eval_batch_size=200, log_every=3),
        recovery=Recovery(checkpoint_every="2steps"),
    )
    inner = buffers.average_buffers
    for name, exact in (("plain", 0), ("exact", 2)):
        taken = found[name] = []

        def counted(model: nn.Module, ranks: int, share: float | None = None, taken: list[int] = taken) -> None:
            if ranks > 1:
                taken.append(int(next(b for n, b in model.named_buffers() if "tracked" in n)))
            inner(model, ranks, share)

        of_sync, of_evaluation = (mock.patch.object(user, "average_buffers", counted) for user in (sync, evaluation))
        with of_sync, of_evaluation:
            trained(world, replace(base, exact=exact), f"{folder}/{name}")
    return found


def test_buffers_are_averaged_once_where_something_is_kept(tmp_path: Path) -> None:
    """At each epoch's end (3, 6, 9, 12) and each checkpoint (2, 4, 8, 10; 6 and 12 are ends); in exact mode never."""
    for rank in run_ranks(averaged_buffers, 2, str(tmp_path)):
        assert rank == {"plain": [2, 3, 4, 6, 8, 9, 10, 12], "exact": []}
