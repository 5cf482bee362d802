"""compare: fair rows, honest gaps, numbers that are what the journals say, and nothing measured twice."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.commands import compare as command
from lockstep.commands.compare import BASES, FIGURES, WORDS, Measured, Plan, aggregate, measure, settings_of
from lockstep.commands.measuring import NotMeasured
from lockstep.config import CommConfig, Config, DataConfig, Execution
from lockstep.config.recipes import recipe
from lockstep.distributed import devices, proc
from lockstep.errors import UserError
from tests.subprocesses import run_lockstep

LEDGER = "5a63b02a" * 8

# What a strategy stands for

_words = st.sampled_from(list(WORDS)).flatmap(
    lambda word: st.integers(1, 99).map(lambda n: word.replace("N", str(n)) if word.endswith("N") else word)
)


@given(st.sampled_from(BASES), st.lists(_words, max_size=4), st.randoms(use_true_random=False))
def test_words_set_their_flags_in_any_order_or_exclude_each_other(base: str, words: list[str], random: Any) -> None:
    shuffled = random.sample(words, len(words))
    try:
        found = settings_of("+".join([base, *words]))
    except UserError:
        with pytest.raises(UserError, match="is set twice"):
            settings_of("+".join([base, *shuffled]))
    else:
        assert found == settings_of("+".join([base, *shuffled]))
        assert found["strategy"] == base
        assert ("precision" in found) == any(word in words for word in ("bf16", "fp16", "tf32"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dpp", "unknown strategy 'dpp'.*ddp"),
        ("ddp+bf61", "unknown word 'bf61'.*bf16"),
        ("ddp+sync_bn", "unknown word 'sync_bn'.*syncbn"),
        ("exact", "exact without its number\n  Write it as exact4"),
        ("exact0", "without its number"),
        ("ddp+accumulate", "accumulate without its number"),
        ("ddp+bf16+fp16", "precision is set twice"),
        ("ddp+compile+compile", "compile is set twice"),
        ("ddp+fp16grads+bf16grads", "compress is set twice"),
        ("ddp+compile4", "unknown word 'compile4'"),
        ("bf16", "unknown strategy 'bf16'"),
        ("ddp+", "unknown word ''"),
    ],
)
def test_a_wrong_strategy_is_named_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(UserError, match=f"(?s){said}"):
        Plan(strategies=(text,))


def test_words_change_the_config_and_nothing_else() -> None:
    plan, config = Plan(), Config().with_execution(nproc=1, threads=2)

    def of(strategy: str, **changed: Any) -> Config:
        return replace(plan, config=replace(plan.config, **changed)).config_for(strategy, 1, 2, gpus=1)

    assert of("ddp") == config
    changed = of("ddp+bf16+accumulate4+syncbn")
    assert (changed.precision, changed.accumulate, changed.model.batch_norm) == ("bf16", 4, "global")
    assert replace(changed, precision="fp32", accumulate=1, model=config.model) == config
    assert of("exact8") == of("ddp+exact8") == replace(config, exact=8)
    links = {"ddp+bf16grads": CommConfig("bf16")}
    assert {text: of(text).comm for text in links} == links
    given = CommConfig("fp16")
    assert of("ddp+bf16", comm=given).comm == given, "what a strategy does not name is as the flags have it"


# The plan


def _plan(*strategies: str, nproc: tuple[int, ...] = (1, 2), repeats: int = 1, **more: Any) -> Plan:
    execution = Execution(device="cpu", out=more.pop("out", ""), threads=more.pop("threads", 0), workers=4)
    config = replace(recipe("digits"), data=DataConfig(fraction=0.1), execution=execution, **more)
    return Plan.of(config, strategies=strategies, nproc=nproc, repeats=repeats)


def test_each_row_gets_an_equal_part_of_threads_and_workers_and_trains_the_same_undisturbed() -> None:
    plan, configs = _plan("ddp"), list[Config]()
    for count in (1, 2, 4):
        configs.append(plan.config_for("ddp", count, cores=8, gpus=0))
        execution = configs[-1].execution
        assert execution.nproc == count
        assert execution.threads * count == 8
        assert execution.workers * count == 4
        assert replace(configs[-1], execution=Execution()) == replace(configs[0], execution=Execution())
    assert plan.config_for("ddp", 4, cores=2, gpus=0).execution.threads == 1
    assert plan.config_for("ddp", 4, cores=2, gpus=4).execution.workers == plan.config.execution.workers
    assert _plan("ddp", threads=3).config_for("ddp", 2, cores=8, gpus=0).execution.threads == 3
    recovery = configs[0].recovery
    assert (recovery.resume, recovery.checkpoint_every, recovery.max_restarts) == ("never", "0", 0)
    assert [type(part) for part in vars(configs[0]).values()] == [type(part) for part in vars(Config()).values()]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategies": ()}, "nothing to compare"),
        ({"strategies": ("ddp+bf16+syncbn", "ddp+syncbn+bf16")}, "twice"),
        ({"nproc": (2, 2)}, "different numbers"),
        ({"nproc": (0,)}, "different numbers"),
        ({"repeats": 0}, "measures nothing"),
        ({"config": Config().with_execution(nnodes=2, master_addr="a", master_port=1)}, "compare with --nnodes"),
    ],
)
def test_a_plan_that_compares_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Plan(**given)


# What a journal says


def journal(
    seconds: Sequence[float],
    *,
    epochs: int = 1,
    comm_wait_ms: float | None = 2.0,
    ledger: str = LEDGER,
    memory: Sequence[float] = (0.5, 0.75),
) -> list[Any]:
    """A run whose log windows of ten steps of 64 images took so many seconds each."""
    per_epoch = len(seconds) // epochs
    records: list[dict[str, Any]] = [{"kind": "run", "devices": ["cpu (AVX2)"]}]
    for number, took in enumerate(seconds, 1):
        record = {"kind": "step", "step": number * 10, "samples": number * 640}
        record["epoch"] = min(epochs, 1 + (number - 1) // per_epoch) - 1
        record |= {"images_per_s": 640 / took, "data_wait_ms": 1.0, "comm_wait_ms": comm_wait_ms}
        records += [record, *([{"kind": "eval"}] if number % per_epoch == 0 else [])]
    end = {"kind": "end", "status": "completed", "steps": len(seconds) * 10, "samples": len(seconds) * 640}
    end |= {"seconds": sum(seconds) + 0.5, "top1": 0.875, "ledger_sha256": ledger, "peak_memory_gib": [*memory]}
    return [*records, end]


def test_the_warm_up_is_left_out() -> None:
    found = measure(journal([9.0, 9.0, *[1.0] * 8], epochs=2))
    assert found["seconds_per_epoch"] == pytest.approx(5.0)  # 5 windows an epoch
    assert found["images_per_s"] == pytest.approx(640.0)
    assert found["total_s"] == pytest.approx(26.5)  # all of it
    assert found["data_wait"] == pytest.approx(0.01)  # 1 ms of a 100 ms step
    assert found["communication"] == pytest.approx(0.02)
    assert (found["memory_sum_gib"], found["memory_largest_gib"], found["top1"]) == (1.25, 0.75, 0.875)
    compiled = measure(journal([9.0] * 5 + [1.0] * 5, epochs=2), compiled=True)
    assert compiled["seconds_per_epoch"] == pytest.approx(5.0)  # the whole first epoch


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=30), st.lists(st.floats(0.001, 1000), max_size=9))
def test_an_epoch_takes_as_long_as_its_windows_and_memory_is_that_of_all(
    seconds: list[float], memory: list[float]
) -> None:
    found = measure(journal(seconds, memory=memory))
    kept = seconds[found["warmup_windows"] :]
    assert 1 <= found["warmup_windows"] <= 2
    assert found["seconds_per_epoch"] == pytest.approx(sum(kept) / len(kept) * len(seconds))
    largest, smallest, total = (found[f"memory_{name}_gib"] for name in ("largest", "smallest", "sum"))
    if not memory:
        assert largest is smallest is total is None
    else:
        assert {smallest, largest} <= set(memory)
        assert smallest * len(memory) * (1 - 1e-12) <= total <= largest * len(memory) * (1 + 1e-12)


def test_a_figure_is_missing_rather_than_wrong() -> None:
    one = measure(journal([1.0]))
    assert one["seconds_per_epoch"] is one["images_per_s"] is one["data_wait"] is None
    assert one["total_s"] == 1.5
    assert measure(journal([1.0] * 4, comm_wait_ms=None))["communication"] is None


# Rounds brought together


def result(step_s: float, **more: Any) -> dict[str, Any]:
    """What a run of 10 windows measured, each step of which took so long."""
    return measure(journal([10 * step_s] * 10, **more))


def row(name: str, rounds: Mapping[int, Mapping[str, Any]], failed: str = "") -> Measured:
    strategy, _, count = name.rpartition(" x")
    config = Config().with_execution(nproc=int(count), threads=1, workers=0)
    return Measured(name, config, failed, dict(rounds), strategy, int(count))


def results(rows: Sequence[Measured], repeats: int = 3) -> dict[str, Any]:
    """As results.json holds them."""
    place = {"cpu": "a processor", "cores": 4, "device": "cpu", "gpus": 0, "torch": "2.11.0"}
    return {"config": Config().to_dict(), "repeats": repeats, "environment": place} | aggregate(rows)


_step_s = st.floats(0.001, 10)


@given(st.lists(st.tuples(_step_s, _step_s, _step_s), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_speed_ups_are_paired_and_intervals_hold_the_median(times: list[tuple[float, float, float]]) -> None:
    names = ["ddp x1", "ddp+bf16 x2", "ddp+bf16 x4"]  # for which no ideal is known
    rows = [row(name, {k: result(t[i]) for k, t in enumerate(times)}) for i, name in enumerate(names)]
    table = {r["name"]: r for r in aggregate(rows)["rows"]}
    assert table["ddp x1"]["speedup"]["median"] == table["ddp x1"]["efficiency"]["median"] == 1.0
    for i, name in enumerate(names):
        found, ratios = table[name], sorted(t[0] / t[i] for t in times)
        assert ratios[0] * 0.999 <= found["speedup"]["median"] <= ratios[-1] * 1.001
        assert found["efficiency"]["median"] == pytest.approx(found["speedup"]["median"] / found["processes"])
        for figure in (found[key] for key in FIGURES):
            if len(times) == 1:
                assert figure["low"] is figure["high"] is None
            else:
                assert figure["low"] <= figure["median"] <= figure["high"]


def test_a_drift_of_the_whole_machine_leaves_the_speed_up_alone() -> None:
    slow = {1: 1.0, 2: 3.0, 3: 10.0}
    rows = [row(f"ddp x{n}", {k: result(f / n) for k, f in slow.items()}) for n in (1, 2)]
    speedup = aggregate(rows)["rows"][1]["speedup"]
    assert [speedup[part] for part in ("median", "low", "high")] == pytest.approx([2.0, 2.0, 2.0])


def test_what_is_to_be_doubted_is_said_beside_the_row() -> None:
    fast = {1: result(1.0)}
    found = results([row("ddp x1", {1: result(37.4)}), row("ddp x2", fast), row("ddp+bf16 x2", fast)], repeats=1)
    assert [each["speedup"] is None for each in found["rows"]] == [False, True, False]  # what bf16 gives nobody knows
    assert found["rows"][1]["efficiency"] is None
    assert "ddp x2: a speed-up of 37.4 is more than its processes can give" in "\n".join(command.explanations(found))
    busy = results([row("ddp x1", {1: result(1.0) | {"others_cores": 1.25}}), row("ddp x2", {1: result(0.6)})])
    lines = command.explanations(busy)
    assert [line.partition(" meanwhile")[0] for line in lines if "busy" in line] == [
        "ddp x1: others kept 1.2 cores busy"
    ]
    assert any("3 rounds: no interval of a median can hold it with more than 75%" in line for line in lines)


def test_another_order_of_samples_is_said_loudly() -> None:
    found = results([row("ddp x1", {1: result(1.0)}), row("ddp x2", {1: result(1.0, ledger="f" * 64)})])
    assert not found["fair"]
    text = "\n".join(command.explanations(found))
    assert "NOT COMPARABLE" in text
    assert "ffffffffffff: ddp x2" in text


def test_the_first_row_that_was_measured_is_the_baseline() -> None:
    rows = [row("ddp x1", {}, "why"), row("ddp x2", {1: result(1.0)}), row("ddp x4", {1: result(0.5)})]
    found = results(rows)
    assert found["baseline"] == "ddp x2"
    assert [each["speedup"] and each["speedup"]["median"] for each in found["rows"]] == [None, 1.0, 2.0]
    assert "ddp x1: not measured: why" in command.explanations(found)
    assert aggregate([row("ddp x1", {}, "why")])["rows"][0]["speedup"] is None


# The whole, with runs that are made up

_SECONDS = {"ddp-x1": 1.1, "ddp-x2": 0.6, "ddp-x4": 0.3, "fsdp-x1": 1.0, "fsdp-x2": 0.7, "ddp+accumulate64-x1": 2.0}


def _measured(calls: list[str], failing: str = "") -> Callable[[Path, Config], dict[str, Any]]:
    def run(folder: Path, config: Config) -> dict[str, Any]:
        kept = folder / "result.json"
        if not kept.exists():
            calls.append(folder.name)
            if folder.name == failing:
                raise NotMeasured("rank 1 failed: out of memory")
            folder.mkdir(parents=True)
            kept.write_text(json.dumps(result(_SECONDS[folder.name[:-3]])))
        return dict(json.loads(kept.read_text()))

    return run


def _silent(_: str) -> None: ...


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "cores", lambda: 2)


def test_rounds_are_interleaved_and_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    plan, calls = _plan("fsdp", "ddp", out=str(tmp_path / "c"), repeats=2), list[str]()
    first = command.compare(plan, _silent, _measured(calls))
    there = ["fsdp-x1", "fsdp-x2", "ddp-x1", "ddp-x2"]
    assert calls == [f"{name}-r1" for name in there] + [f"{name}-r2" for name in reversed(there)]
    assert command.compare(plan, _silent, _measured(calls)) == first
    more = command.compare(replace(plan, repeats=3), _silent, _measured(calls))
    assert calls[8:] == [f"{name}-r3" for name in there]
    assert [r["name"] for r in more["rows"]] == [r["name"] for r in first["rows"]]
    assert json.loads((tmp_path / "c/results.json").read_text()) == json.loads(json.dumps(more))
    with pytest.raises(UserError, match=r"conditions.*\n    config\.seed: 0 -> 1\n"):
        command.compare(_plan("ddp", out=str(tmp_path / "c"), seed=1), _silent, _measured(calls))


def test_what_can_t_be_measured_here_is_not_started_and_a_failure_is_not_repeated(tmp_path: Path) -> None:
    strategies = ("ddp", "ddp+fp16", "exact2+syncbn", "ddp+tf32", "ddp+accumulate64")
    plan, calls = _plan(*strategies, nproc=(1, 2, 4), out=str(tmp_path / "c"), repeats=2), list[str]()
    found = command.compare(plan, _silent, _measured(calls, failing="ddp-x2-r1"))
    once = ["ddp-x1-r1", "ddp-x2-r1", "ddp+accumulate64-x1-r1"]
    assert calls == [*once, "ddp+accumulate64-x1-r2", "ddp-x1-r2"]
    why = {r["name"]: r["not_measured"] for r in found["rows"]}
    assert "4 threads on 2 CPU cores" in why["ddp x4"]
    assert "fp16 on a CPU" in why["ddp+fp16 x1"]
    assert "--batch-norm global" in why["exact2+syncbn x1"]
    assert "TF32" in why["ddp+tf32 x1"]
    assert "smaller than the 2 processes" in why["ddp+accumulate64 x2"]
    assert why["ddp x2"] == "rank 1 failed: out of memory"
    assert found["baseline"] == "ddp x1"
    for r in found["rows"]:
        assert bool(r["note"]) == bool(r["not_measured"])
        assert all(r[name] is None for name in FIGURES) == bool(r["not_measured"])


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (16, [1, 2, 4])])
def test_by_default_1_2_and_4_processes_as_far_as_there_are_cores(
    cores: int, counts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (proc, devices):
        monkeypatch.setattr(place, "cores", lambda: cores)
    plan = _plan("ddp", nproc=(), out=str(tmp_path / "c"))
    found = command.compare(plan, _silent, _measured([]))
    assert [(r["processes"], r["threads"], r["not_measured"]) for r in found["rows"]] == [
        (n, cores // n, "") for n in counts
    ]


def test_processes_that_would_share_a_gpu_are_not_measured() -> None:
    plan = _plan("ddp", nproc=(2,))
    assert "2 processes would share 1 GPU" in command.row_of(plan, "ddp", 2, 1, 2).failed


# The real command


@pytest.mark.slow
def test_the_real_command_compares_and_goes_on(tmp_path: Path) -> None:
    flags = {
        "fraction": 0.1,
        "epochs": 1,
        "batch-size": 16,
        "log-every": 1,
        "device": "cpu",
        "threads": 1,
        "nproc": "1,2",
    }
    flags |= {"strategies": "ddp,ddp+syncbn+fp16", "repeats": 1, "out": "found"}
    words = ["compare", "digits", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    ended = run_lockstep(*words, cwd=tmp_path, timeout=120)
    assert ended.code == 0, ended.text
    assert not ended.orphans
    assert "same samples in the same order" in ended.out
    found = json.loads((tmp_path / "found" / "results.json").read_text())
    single, ddp, _, half = found["rows"]
    assert single["speedup"]["median"] == 1.0
    assert ddp["seconds_per_epoch"]["median"] > 0
    assert "fp16" in half["not_measured"]
    assert len(found["ledgers"]) == 1
    kept = (tmp_path / "found/ddp-x2-r1/result.json").stat().st_mtime_ns
    run_lockstep(*words, cwd=tmp_path, timeout=60)
    assert json.loads((tmp_path / "found" / "results.json").read_text()) == found
    assert (tmp_path / "found/ddp-x2-r1/result.json").stat().st_mtime_ns == kept


def test_of_one_round_no_median_is_told_and_of_no_row_no_order() -> None:
    lines = command.explanations(results([row("ddp x1", {}, "why"), row("ddp x2", {}, "why")], repeats=1))
    assert lines[1].endswith("; one round, no interval.")
    assert lines[-1] == "No row could be measured here."
    assert not any("median" in line or "same order" in line for line in lines)
