"""What is kept as the best and when a run stops: by definition, on any number of ranks, and through a resume."""

import dataclasses
import signal
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint import weights
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery, SelectionConfig
from lockstep.config.fields import with_values
from lockstep.config.optim import SMALLER_IS_BETTER, Metric
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.control import OUT_OF_TIME, Control
from lockstep.training.loop import train
from lockstep.training.state import State, is_over, note_result
from tests.journals import read
from tests.ranks import run_ranks
from tests.subprocesses import run_lockstep
from tests.training.test_resume import all_of, trained

PATIENT = Config(
    batch_size=30,
    exact=4,
    epochs=12,
    data=DataConfig(dataset="digits", fraction=0.1),  # 144 samples: 5 steps an epoch
    model=ModelConfig(model="tests.parallel.test_exact:small_net"),
    optim=OptimConfig(optimizer="adamw", lr=0.05, ema=0.6, ema_warmup=True, schedule="constant"),
    selection=SelectionConfig(keep_best="macro-f1", patience=2, min_delta=0.01),
    execution=Execution(log_every=3, eval_batch_size=200),
    recovery=Recovery(checkpoint_every="4steps", hang_timeout=60),
)


def reference(values: list[float], smaller: bool, patience: int, delta: float) -> tuple[int, int]:
    """(index of the first best value, index after which it stops) by the definition, over a list that is known."""
    sign = -1 if smaller else 1
    ends = len(values) - 1
    goal, waited = sign * values[0], 0
    for i, value in enumerate(values[1:], 1):
        if sign * value > goal + delta:
            goal, waited = sign * value, 0
        else:
            waited += 1
        if waited == patience:
            ends = i
            break
    seen = [sign * value for value in values[: ends + 1]]
    return seen.index(max(seen)), ends


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.625, 0.75, 1.0]), min_size=1, max_size=12),
    st.sampled_from(get_args(Metric)),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.125, 0.25]),
)
def test_the_best_and_the_end_are_those_of_the_definition(
    values: list[float], metric: Metric, patience: int, delta: float
) -> None:
    config = Config(epochs=99, selection=SelectionConfig(keep_best=metric, patience=patience, min_delta=delta))
    state, bests, ends = State(), [], len(values) - 1
    for i, value in enumerate(values):
        state.steps += 1
        name = "macro_recall" if metric == "balanced-accuracy" else metric.replace("-", "_")
        if note_result(config.selection, state, {name: value}):
            bests.append(i)
        if is_over(config, state):
            ends = i
            break
    assert (bests[-1], ends) == reference(values, metric in SMALLER_IS_BETTER, patience, delta)
    assert state.best == values[bests[-1]]
    assert state.best_step == bests[-1] + 1


def test_a_loss_that_is_not_finite_is_never_the_best() -> None:
    config, state = SelectionConfig(keep_best="loss", patience=1), State(steps=1)
    assert note_result(config, state, {"loss": float("nan")})  # there is something to evaluate later
    state.steps = 2
    assert note_result(config, state, {"loss": 9.0})
    state.steps = 3
    assert not note_result(config, state, {"loss": float("inf")})
    assert (state.best, state.best_step, state.waited) == (9.0, 2, 1)


def journal_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [{**r, "time": 0} for r in read(folder / "journal.jsonl") if r["kind"] == kind]


@pytest.mark.slow
def test_a_run_stops_at_the_same_step_with_the_same_bits_on_any_number_of_ranks_and_through_a_resume(
    tmp_path: Path,
) -> None:
    folders = {name: tmp_path / name for name in ("one", "two", "three")}
    trained(World.single(), PATIENT, str(folders["one"]))
    whole = read(folders["one"] / "journal.jsonl")[-1]
    at = whole["steps"]
    assert 10 < at < 60, "it stopped before its last epoch"
    again = tmp_path / "again"  # interrupted in the midst of the epoch in which it stops
    jobs = [(PATIENT, str(folders["two"])), (PATIENT, str(again), at - 2)]
    for n, mine in {2: jobs, 3: [(PATIENT, str(folders["three"]))]}.items():
        run_ranks(all_of, n, mine, timeout=240)
    trained(World.single(), PATIENT, str(again))
    wanted = [journal_of(folders["one"], kind) for kind in ("eval", "classes", "stop")]
    assert wanted[2][0]["reason"] == "patience"
    for folder in (*folders.values(), again):
        end = read(folder / "journal.jsonl")[-1]
        assert (end["status"], end["steps"]) == ("completed", at)
        assert end["ledger_sha256"] == whole["ledger_sha256"]
        assert end["weights_sha256"] == whole["weights_sha256"]
        assert [journal_of(folder, kind) for kind in ("eval", "classes", "stop")] == wanted
        assert weights.read_metadata(folder / "weights/best.safetensors")["step"] == str(wanted[2][0]["best_step"])
    by_class = wanted[1][-1]
    assert [sum(row) for row in by_class["confusion"]] == by_class["images"]
    assert sum(by_class["correct"]) / sum(by_class["images"]) == pytest.approx(wanted[0][-1]["top1"])
    assert sum(by_class["f1"]) / 10 == pytest.approx(wanted[0][-1]["macro_f1"], abs=1e-6)

    state = train(PATIENT, World.single(), folders["one"]).state  # the same command once more has nothing to do
    assert (state.steps, journal_of(folders["one"], "stop")) == (at, wanted[2])
    with pytest.raises(UserError, match=r"eval_every: 1 -> 2"):  # patience counts evaluations
        train(with_values(PATIENT, {"eval_every": 2}), World.single(), folders["one"])
    longer = with_values(PATIENT, {"epochs": at // 5 + 1, "patience": 9, "override": ("patience", "epochs")})
    assert train(longer, World.single(), folders["one"]).state.steps == at + 5


def test_a_command_that_has_nothing_left_to_do_says_why(tmp_path: Path) -> None:
    command = ("train", "--model", "mlp", "--fraction", "0.1", "--threads", "1", "--nproc", "1")
    for out, flags, why in [
        ("whole", ("--epochs", "2"), "all 2 epochs are done already\n"),
        ("patient", ("--epochs", "9", "--patience", "1", "--min-delta", "1"), "ended by --patience at step {}; "),
    ]:
        first, again = (run_lockstep(*command, *flags, "--out", out, cwd=tmp_path) for _ in range(2))
        assert (first.code, again.code) == (0, 0), first.text + again.text
        why = why.format(read(tmp_path / out / "journal.jsonl")[-1]["steps"])
        assert (why in first.out, why in again.out) == (False, True), again.text
    longer = run_lockstep(*command, *flags, "--patience", "2", "--override", "patience", "--out", out, cwd=tmp_path)
    assert "trained in " in longer.out, longer.text


def limited(world: World, folder: str, limit: str) -> int:
    """Train until the time is over, which each call to a clock brings nearer."""
    config = with_values(dataclasses.replace(PATIENT, selection=SelectionConfig(), epochs=3), {"max_time": limit})
    agree = Control.agree

    def ticking(self: Control, steps: int, failed: bool = False, now: bool = False) -> Any:
        if limit and world.rank == 0 and steps >= 7:
            self.deadline = 0.0
        return agree(self, steps, failed, now)

    with mock.patch.object(Control, "agree", ticking):
        return trained(world, config, folder)


def test_a_run_whose_time_is_over_ends_with_a_checkpoint_and_goes_on_by_the_same_command(tmp_path: Path) -> None:
    whole, timed = tmp_path / "whole", tmp_path / "timed"
    limited(World.single(), str(whole), "")
    assert run_ranks(limited, 2, str(timed), "1h", timeout=240) == [OUT_OF_TIME] * 2
    records = read(timed / "journal.jsonl")
    assert [r["status"] for r in records if r["kind"] == "end"] == ["interrupted"]
    (stop,) = journal_of(timed, "stop")
    assert stop["reason"] == "max-time"
    assert stop["step"] >= 7
    assert (timed / f"checkpoints/step-{stop['step']:09d}").is_dir()
    limited(World.single(), str(timed), "")
    end, wanted = (read(folder / "journal.jsonl")[-1] for folder in (timed, whole))
    for name in ("status", "steps", "ledger_sha256", "weights_sha256", "top1"):
        assert end[name] == wanted[name], name


def test_a_signal_is_heard_before_the_clock() -> None:
    request: Any = type("Request", (), {"signal": signal.SIGTERM})()
    control = Control(World.single(), request, Recovery().checkpoint_interval, 5, deadline=0.0)
    assert control.agree(1).stop == signal.SIGTERM
    request.signal = 0
    assert control.agree(2).stop == OUT_OF_TIME
    control.deadline = float("inf")
    assert control.agree(3).stop == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("6h", 21600), ("90min", 5400), ("90m", 5400), ("30s", 30), ("1.5d", 129600), ("", 0)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert Recovery(max_time=text).max_seconds == seconds


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (Recovery, {"max_time": "6"}, "--max-time 6 is not a time"),
        (Recovery, {"max_time": "0h"}, "--max-time 0h ends at once"),
        (Recovery, {"max_time": "6h", "checkpoint_every": "0"}, "nothing would be kept"),
        (SelectionConfig, {"patience": -1}, "--patience -1"),
        (SelectionConfig, {"min_delta": 0.5}, "--min-delta 0.5 with --patience 0"),
    ],
)
def test_refusals_name_the_flag(cls: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        cls(**values)
    assert message in caught.value.message
    assert caught.value.remedy
