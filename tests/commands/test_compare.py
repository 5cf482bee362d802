"""compare: fair rows, honest gaps, numbers that are what the journals say, and nothing measured twice."""

import csv
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lockstep.commands.compare import cells, tables
from lockstep.commands.compare import run as running
from lockstep.commands.compare.cells import NotMeasured, measure, printed_error
from lockstep.commands.compare.plan import Cell, Plan
from lockstep.commands.compare.results import FIGURES, aggregate
from lockstep.commands.compare.strategies import BASES, Strategy, parse
from lockstep.commands.shared.measured import interval, watch_others
from lockstep.config import Config, DataConfig, Execution, LinkConfig
from lockstep.config.recipes import recipe
from lockstep.errors import UserError
from lockstep.processes import proc
from tests.commands.comparisons import example, journal, result, results, row
from tests.subprocesses import run_lockstep

# The grammar

_switches = st.sets(st.sampled_from(["syncbn", "compile", "channels_last"]))
_links = st.tuples(st.sampled_from(["fp16grads", "bf16grads"]), st.just(0)) | st.tuples(
    st.sampled_from(["powersgd", "local", "diloco"]), st.integers(1, 99)
)
_strategies = st.builds(
    lambda base, slices, precision, accumulate, link, stages, switches: Strategy(
        "ddp" if slices else base,
        (
            *([("exact", slices)] if slices else []),
            *([(precision, 0)] if precision else []),
            *([("accumulate", accumulate)] if accumulate else []),
            *link,
            *([("stages", stages)] if stages else []),
            *((name, 0) for name in ("syncbn", "compile", "channels_last") if name in switches),
        ),
    ),
    st.sampled_from(BASES),
    st.integers(0, 99),
    st.sampled_from(["", "bf16", "fp16", "tf32"]),
    st.integers(0, 64),
    st.lists(_links, max_size=1),
    st.integers(0, 9),
    _switches,
)


@given(_strategies)
def test_a_strategy_is_read_back_from_its_name(strategy: Strategy) -> None:
    assert parse(strategy.name) == strategy


@given(_strategies, st.randoms(use_true_random=False))
def test_the_order_of_modifiers_says_nothing(strategy: Strategy, random: Any) -> None:
    base, *modifiers = strategy.name.split("+")
    random.shuffle(modifiers)
    assert parse("+".join([base, *modifiers])) == strategy


_words = st.sampled_from(
    [*BASES, "exact", "exact8", "exact08", "bf16", "fp16", "accumulate2", "compile", "syncbn", "x", ""]
)


@given(st.lists(_words, min_size=1, max_size=4))
def test_any_words_are_a_strategy_or_an_error_with_a_remedy(words: list[str]) -> None:
    try:
        name = parse("+".join(words)).name
    except UserError as error:
        remedy = error.remedy
    else:
        assert sorted(name.split("+")) == sorted(word.replace("exact08", "exact8") for word in words)
        return
    assert remedy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dpp", "unknown strategy 'dpp'.*dp"),
        ("ddp+bf61", "unknown modifier 'bf61'.*bf16"),
        ("ddp+sync_bn", "unknown modifier 'sync_bn'.*syncbn"),
        ("exact", "number of slices"),
        ("exact0", "number of slices"),
        ("ddp+accumulate", "number of micro-batches"),
        ("ddp+bf16+fp16", "bf16 and fp16 at once"),
        ("ddp+compile+compile", "compile stands there twice"),
        ("ddp+accumulate2+accumulate4", "accumulate2 and accumulate4 at once"),
        ("ddp+local8+fp16grads", "local8 and fp16grads at once"),
        ("ddp+powersgd4+diloco2", "powersgd4 and diloco2 at once"),
        ("ddp+exact8", "unknown modifier 'exact8'"),
        ("ddp+compile4", "unknown modifier 'compile4'"),
        ("bf16", "unknown strategy 'bf16'"),
        ("ddp+", "unknown modifier ''"),
    ],
)
def test_a_wrong_strategy_is_named_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(UserError, match=f"(?s){said}"):
        Plan(strategies=(text,))


def test_modifiers_change_the_config_and_nothing_else() -> None:
    config = Config()
    changed = parse("ddp+bf16+accumulate4+syncbn").applied(config)
    assert (changed.precision, changed.accumulate, changed.model.batch_norm) == ("bf16", 4, "global")
    assert replace(changed, precision="fp32", accumulate=1, model=config.model) == config
    assert parse("exact8").applied(config) == replace(config, exact=8)
    assert parse("fsdp").applied(config, nproc=2) == config.with_execution(strategy="fsdp", nproc=2)
    assert parse("ddp+stages3").applied(config) == config.with_execution(model_parallel=3)
    given = replace(config, link=LinkConfig(sync_every=4, outer_momentum=0.5))
    links = {
        "ddp+powersgd2": LinkConfig("powersgd:2"),
        "ddp+bf16grads": LinkConfig("bf16"),
        "ddp+local8": LinkConfig(sync_every=8),
        "ddp+diloco8": LinkConfig(sync_every=8, outer_lr=0.7, outer_momentum=0.9),
        "ddp": given.link,
    }
    assert {text: parse(text).applied(given).link for text in links} == links


# The plan


def _plan(*strategies: str, nproc: tuple[int, ...] = (1, 2), repeats: int = 1, **more: Any) -> Plan:
    execution = Execution(device="cpu", out=more.pop("out", ""), threads=more.pop("threads", 0), workers=4)
    baseline = more.pop("baseline", "")
    config = replace(recipe("digits"), data=DataConfig(fraction=0.1), execution=execution, **more)
    return Plan.of(config, strategies=strategies, nproc=nproc, repeats=repeats, baseline=baseline)


def test_each_row_gets_an_equal_part_of_threads_and_workers() -> None:
    plan = _plan("single", "dp", "ddp", nproc=(4, 1, 2))
    rows = plan.cells(most=2)
    assert [cell.name for cell in rows] == ["single x1", "dp x1", "ddp x1", "ddp x2", "ddp x4"]
    for cell in rows:
        execution = plan.config_for(cell, cores=8).execution
        assert execution.threads * cell.processes == 8
        assert execution.workers * cell.processes == 4
    assert plan.config_for(rows[-1], cores=2).execution.threads == 1
    assert plan.config_for(rows[-1], cores=2, on_gpus=True).execution.workers == plan.config.execution.workers
    assert _plan("ddp", threads=3).config_for(Cell(Strategy(), 2), cores=8).execution.threads == 3


def test_rows_train_the_same_experiment_undisturbed() -> None:
    plan = _plan("ddp", "single")
    configs = [plan.config_for(cell, cores=2) for cell in plan.cells(2)]
    assert all(
        replace(config, execution=Execution()) == replace(configs[0], execution=Execution()) for config in configs
    )
    recovery = configs[0].recovery
    assert (recovery.resume, recovery.checkpoint_every, recovery.max_restarts) == ("never", "0", 0)
    assert [type(part) for part in vars(configs[0]).values()] == [type(part) for part in vars(Config()).values()]


def test_numbers_of_processes_go_as_far_as_the_machine_where_none_are_given() -> None:
    plan = _plan("ddp", nproc=())
    assert [[cell.processes for cell in plan.cells(most)] for most in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategies": ()}, "nothing to compare"),
        ({"strategies": ("ddp+bf16+syncbn", "ddp+syncbn+bf16")}, "twice"),
        ({"nproc": (2, 2)}, "twice"),
        ({"nproc": (0,)}, "starts no process"),
        ({"repeats": 0}, "measures nothing"),
    ],
)
def test_a_plan_that_compares_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Plan(**given)


def test_the_baseline_is_named_with_or_without_processes() -> None:
    plan = _plan("single", "ddp", nproc=(2, 4))
    rows = plan.cells(4)
    for wanted, name in {"ddp": "ddp x2", "ddp-x4": "ddp x4", "ddp x4": "ddp x4", "": "single x1"}.items():
        assert replace(plan, baseline=wanted).baseline_of(rows, rows).name == name
    assert plan.baseline_of(rows, rows[1:]).name == "ddp x2"  # the first that can be measured
    with pytest.raises(UserError, match="ddp-x2"):
        replace(plan, baseline="ddp-x3").baseline_of(rows, rows)


# What a journal says


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


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=30))
def test_an_epoch_takes_as_long_as_its_windows(seconds: list[float]) -> None:
    found = measure(journal(seconds))
    kept = seconds[found["warmup_windows"] :]
    assert 1 <= found["warmup_windows"] <= 2
    assert found["seconds_per_epoch"] == pytest.approx(sum(kept) / len(kept) * len(seconds))


def test_a_figure_is_missing_rather_than_wrong() -> None:
    one = measure(journal([1.0]))
    assert one["seconds_per_epoch"] is one["images_per_s"] is one["data_wait"] is None
    assert one["total_s"] == 1.5
    assert measure(journal([1.0] * 4, comm_wait_ms=None))["communication"] is None
    for broken in (journal([1.0], status="failed"), journal([1.0])[:-1], []):
        with pytest.raises(NotMeasured, match="did not complete"):
            measure(broken)


@given(st.lists(st.floats(0.001, 1000), max_size=9))
def test_memory_is_known_for_each_process_or_device(memory: list[float]) -> None:
    found = measure(journal([1.0, 1.0], memory=memory))
    assert found["memory_gib"] == memory
    if not memory:
        assert found["memory_sum_gib"] is found["memory_largest_gib"] is found["memory_smallest_gib"] is None
    else:
        assert found["memory_smallest_gib"] <= found["memory_sum_gib"] / len(memory) * (1 + 1e-12)
        assert found["memory_largest_gib"] >= found["memory_sum_gib"] / len(memory) * (1 - 1e-12)
        assert {found["memory_smallest_gib"], found["memory_largest_gib"]} <= set(memory)


def test_the_command_s_own_message_is_the_reason() -> None:
    said = "Traceback ...\nValueError: inner\nlockstep: rank 1 failed: inner\n  Do this.\n"
    assert printed_error(said) == "rank 1 failed: inner"
    assert printed_error("only this\n\n") == "only this"
    assert printed_error("") == ""


# Rounds brought together

_step_s = st.floats(0.001, 10)


@given(st.lists(st.tuples(_step_s, _step_s, _step_s), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_speed_ups_are_paired_and_intervals_hold_the_median(times: list[tuple[float, float, float]]) -> None:
    names = ["single x1", "ddp+bf16 x2", "ddp+bf16 x4"]  # for which no ideal is known
    rows = [row(name, {k: result(t[i]) for k, t in enumerate(times)}) for i, name in enumerate(names)]
    table = {r["name"]: r for r in aggregate(rows, "single x1")["rows"]}
    base = table["single x1"]
    assert base["speedup"]["median"] == base["efficiency"]["median"] == 1.0
    for i, name in enumerate(names):
        found, ratios = table[name], sorted(t[0] / t[i] for t in times)
        assert ratios[0] * 0.999 <= found["speedup"]["median"] <= ratios[-1] * 1.001
        count = found["processes"]
        assert found["efficiency"]["median"] == pytest.approx(found["speedup"]["median"] / count)
        for key in FIGURES:
            figure = found[key]
            if len(times) == 1:
                assert figure["low"] is figure["high"] is None
            else:
                assert figure["low"] <= figure["median"] <= figure["high"]


def test_a_drift_of_the_whole_machine_leaves_the_speed_up_alone() -> None:
    slow = {1: 1.0, 2: 3.0, 3: 10.0}
    rows = [row(f"ddp x{n}", {k: result(f / n) for k, f in slow.items()}) for n in (1, 2)]
    speedup = aggregate(rows, "ddp x1")["rows"][1]["speedup"]
    assert [speedup[part] for part in ("median", "low", "high")] == pytest.approx([2.0, 2.0, 2.0])


def test_a_speed_up_beyond_the_ideal_is_marked_and_not_printed() -> None:
    rows = [row("ddp x1", {1: result(37.4)}), row("ddp x2", {1: result(1.0)}), row("ddp+bf16 x2", {1: result(1.0)})]
    found = results(rows, "ddp x1", repeats=1)
    assert [each["speedup"] is None for each in found["rows"]] == [
        False,
        True,
        False,
    ]  # what bf16 can give nobody knows
    assert found["rows"][1]["efficiency"] is None
    text = tables.markdown(found)
    assert "| ddp x2 [1] |" in text
    assert "[1] a speed-up of 37.4 is more than its processes can give" in text


def test_a_machine_that_others_use_is_said() -> None:
    rows = [row("ddp x1", {1: result(1.0) | {"others_cores": 1.25}}), row("ddp x2", {1: result(0.6)})]
    text = tables.markdown(results(rows, "ddp x1", repeats=1))
    assert "| ddp x1 [1] |" in text
    assert "[1] others kept 1.2 cores busy meanwhile" in text
    assert "| ddp x2 |" in text


def test_others_are_those_that_this_process_did_not_start() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        used = psutil.Process(stranger.pid).cpu_times
        others, began = watch_others(), time.monotonic()
        while used().user < 1.5:
            time.sleep(0.05)
        seen = others() * (time.monotonic() - began)
    finally:
        stranger.kill()
        stranger.wait()
    assert seen > 1.0  # core seconds: it is not counted as ours before it has ended


def test_the_interval_is_that_of_a_binomial() -> None:
    low, high = interval([float(n) for n in range(1, 42)])  # the exact order-statistic interval is 14 ... 28
    assert 13 <= low <= 16
    assert 26 <= high <= 29


def test_another_order_of_samples_is_said_loudly() -> None:
    rows = [row("ddp x1", {1: result(1.0)}), row("ddp x2", {1: result(1.0, ledger="f" * 64)})]
    found = results(rows, "ddp x1", repeats=1)
    assert not found["fair"]
    assert "NOT COMPARABLE" in tables.markdown(found)
    assert "ffffffffffff: ddp x2" in tables.markdown(found)


def test_without_its_baseline_no_row_has_a_speed_up() -> None:
    rows = [row("dp x1", {}, "why"), row("ddp x2", {1: result(1.0)})]
    found = aggregate(rows, "dp x1")["rows"][1]
    assert found["speedup"] is found["efficiency"] is None
    assert found["seconds_per_epoch"]["median"] > 0


def test_the_memory_of_each_gpu_is_shown_where_one_process_drives_several() -> None:
    uneven = [(3.0, 0.8, 0.7), (3.1, 0.8, 0.8), (3.2, 0.7, 0.8)]
    rows = [
        row("dp x1", {k: result(1.0, memory=memory) for k, memory in enumerate(uneven)}),
        row("ddp x3", {k: result(1.0, memory=(1.0, 0.9, 0.9)) for k in range(3)}),
        row("single x1", {k: result(1.0, memory=[1.5] * (1 + k)) for k in range(3)}),  # of runs that are not alike
    ]
    rows.append(row("ddp x2", {0: result(1.0, memory=(2.0, 0.0, 2.0, 0.0))}))  # a model in stages, one of them idle
    found = results(rows, "dp x1")
    dp, ddp, single, _ = found["rows"]
    assert dp["memory_gib"] == [3.1, 0.8, 0.8]
    assert (dp["memory_largest_gib"]["median"], dp["memory_smallest_gib"]["median"]) == (3.1, 0.7)
    assert ddp["memory_gib"] == [1.0, 0.9, 0.9]
    assert single["memory_gib"] == []
    lines = [line for line in tables.explanations(found) if "on its devices" in line]
    assert lines == [
        "dp x1: 3.10, 0.800, 0.800 GiB on its devices; the most is 3.9 times the least, "
        "and the first also holds optimizer, outputs and loss.",
        "ddp x2: 2.00, 0.00, 2.00, 0.00 GiB on its devices.",
    ]


# The whole, with runs that are made up


def _measured(seconds: dict[str, float], calls: list[str]) -> Callable[[Config, Path], dict[str, Any]]:
    def run(config: Config, folder: Path) -> dict[str, Any]:
        kept = folder / "result.json"
        if not kept.exists():
            calls.append(folder.name)
            folder.mkdir(parents=True)
            kept.write_text(json.dumps(result(seconds[folder.name[:-3]])))
        return dict(json.loads(kept.read_text()))

    return run


_SECONDS = {"single-x1": 1.0, "ddp-x1": 1.1, "ddp-x2": 0.6, "ddp+accumulate64-x1": 2.0}


def _silent(_: str) -> None: ...


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (running, proc):
        monkeypatch.setattr(module, "cores", lambda: 2)


def test_rounds_are_interleaved_and_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    plan, calls = _plan("single", "ddp", out=str(tmp_path / "c"), repeats=2), list[str]()
    first = running.compare(plan, _silent, _measured(_SECONDS, calls))
    there = ["single-x1", "ddp-x1", "ddp-x2"]
    assert calls == [f"{name}-r1" for name in there] + [f"{name}-r2" for name in reversed(there)]
    calls.clear()
    assert running.compare(plan, _silent, _measured(_SECONDS, calls)) == first
    assert calls == []
    more = running.compare(replace(plan, repeats=3), _silent, _measured(_SECONDS, calls))
    assert calls == [f"{name}-r3" for name in there]
    assert [r["name"] for r in more["rows"]] == [r["name"] for r in first["rows"]]


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    plan, calls, said = _plan("single", "ddp", out=str(tmp_path / "c")), list[str](), list[str]()

    def stopped(config: Config, folder: Path) -> dict[str, Any]:
        if folder.name == "ddp-x1-r1":
            raise KeyboardInterrupt
        return _measured(_SECONDS, calls)(config, folder)

    with pytest.raises(KeyboardInterrupt):
        running.compare(plan, said.append, stopped)
    assert said[-1].startswith("stopped") and str(tmp_path / "c") in said[-1]  # noqa: PT018
    found = running.compare(plan, _silent, _measured(_SECONDS, calls))
    assert calls == ["single-x1-r1", "ddp-x1-r1", "ddp-x2-r1"]
    whole = running.compare(replace(plan, config=_plan("ddp", out=str(tmp_path / "d")).config), _silent,
                            _measured(_SECONDS, calls))  # fmt: skip
    assert found["rows"] == whole["rows"]


def test_the_folder_of_another_comparison_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    running.compare(_plan("single", out=out), _silent, _measured(_SECONDS, []))
    with pytest.raises(UserError, match=r"conditions.*\n    config\.seed: 0 -> 1\n  Rows"):
        running.compare(_plan("single", out=out, seed=1), _silent, _measured(_SECONDS, []))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    with pytest.raises(UserError, match="not empty"):
        running.compare(_plan("single", out=str(tmp_path / "other")), _silent, _measured(_SECONDS, []))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine"]


def test_what_can_t_be_measured_here_is_not_started(tmp_path: Path) -> None:
    strategies = ("dp", "single", "ddp", "ddp+fp16", "exact2+syncbn", "ddp+tf32", "ddp+accumulate64")
    plan, calls = _plan(*strategies, nproc=(1, 2, 4), out=str(tmp_path / "c")), list[str]()
    found = running.compare(plan, _silent, _measured(_SECONDS, calls))
    assert calls == ["single-x1-r1", "ddp-x1-r1", "ddp-x2-r1", "ddp+accumulate64-x1-r1"]
    why = {r["name"]: r["not_measured"] for r in found["rows"]}
    assert "two GPUs" in why["dp x1"]
    assert "4 processes on 2 CPU cores" in why["ddp x4"]
    assert "fp16 on a CPU" in why["ddp+fp16 x1"]
    assert "--batch-norm global" in why["exact2+syncbn x1"]
    assert "TF32" in why["ddp+tf32 x1"]
    assert "smaller than the 2 processes" in why["ddp+accumulate64 x2"]
    assert not why["ddp x2"]
    assert found["baseline"] == "single x1"
    for r in found["rows"]:
        assert (r["note"] is None) == (not r["not_measured"])
        assert all(r[name] is None for name in FIGURES) == bool(r["not_measured"])


def test_on_gpus_a_row_counts_those_that_it_drives() -> None:
    plan = _plan("dp", "ddp", nproc=(2,))
    dp, ddp = (running._row(plan, cell, gpus=4) for cell in plan.cells(4))
    assert (dp.processes, dp.devices, ddp.devices) == (1, 4, 2)
    assert "2 processes would share 1 GPU" in running._row(plan, plan.cells(4)[1], gpus=1).not_measured


def test_a_run_that_fails_leaves_its_reason_and_is_not_repeated(tmp_path: Path) -> None:
    calls: list[str] = []

    def measure_or_fail(config: Config, folder: Path) -> dict[str, Any]:
        if folder.name.startswith("ddp-x2"):
            calls.append(folder.name)
            raise NotMeasured("rank 1 failed: out of memory")
        return _measured(_SECONDS, [])(config, folder)

    plan = _plan("single", "ddp", out=str(tmp_path / "c"), repeats=3)
    found = running.compare(plan, _silent, measure_or_fail)
    assert calls == ["ddp-x2-r1"]
    assert found["rows"][2]["not_measured"] == "rank 1 failed: out of memory"
    assert found["rows"][1]["repeats"] == 3


def test_the_csv_holds_the_numbers_of_the_json() -> None:
    found = example()
    rows = list(csv.DictReader(tables.as_csv(found).splitlines()))
    assert [r["name"] for r in rows] == [r["name"] for r in found["rows"]]
    for line, r in zip(rows, found["rows"], strict=True):
        for name in FIGURES:
            for column, part in ((name, "median"), (f"{name}_low", "low"), (f"{name}_high", "high")):
                expected = r[name][part] if r[name] else None
                assert (float(line[column]) if line[column] else None) == expected


def test_markdown_has_a_line_for_each_row_and_each_note() -> None:
    found = example()
    lines = tables.markdown(found).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(found["rows"])
    assert {line.count("|") for line in table} == {len(tables.columns(found)) + 1}
    assert "not measured [1]" in table[-1]
    assert any(line.startswith("- [1] not measured: --strategy dp needs two GPUs") for line in lines)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_narrow_terminal_shows_fewer_columns_whole(width: int) -> None:
    out = io.StringIO()
    tables.show(example(), Console(file=out, width=width, force_terminal=True, color_system=None, highlight=False))
    lines = out.getvalue().splitlines()
    first = next(line for line in lines if "single x1" in line and "%" in line)
    assert first.split()[:2] == ["single", "x1"]
    assert {"2.00", "1.00", "87.50"} <= set(first.split())  # s/epoch, speed-up and top-1 are never left out
    assert any("too narrow" in line for line in lines) == (width < 200)


# The real command


@pytest.mark.slow
def test_the_real_command_compares_and_goes_on(tmp_path: Path) -> None:
    flags = {"fraction": 0.1, "epochs": 1, "batch-size": 16, "log-every": 1, "device": "cpu", "threads": 1, "nproc": 2}
    flags |= {"strategies": "single,ddp,ddp+syncbn+fp16", "repeats": 1, "out": "found"}
    words = ["compare", "digits", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    ended = run_lockstep(*words, cwd=tmp_path, timeout=120, fresh=True)
    assert ended.code == 0, ended.text
    assert not ended.orphans
    assert "same samples in the same order" in ended.out
    found = json.loads((tmp_path / "found" / "results.json").read_text())
    single, ddp, half = found["rows"]
    assert single["speedup"]["median"] == 1.0
    assert ddp["seconds_per_epoch"]["median"] > 0
    assert "fp16" in half["not_measured"]
    assert len(found["ledgers"]) == 1
    again = run_lockstep(*words, cwd=tmp_path, timeout=60)
    assert json.loads((tmp_path / "found" / "results.json").read_text()) == found
    assert again.err.count("is there") == 2


@pytest.mark.slow
def test_a_run_s_own_message_is_why_it_was_not_measured(tmp_path: Path) -> None:
    config = replace(recipe("digits"), execution=Execution(device="cpu", nproc=1, data_dir=str(tmp_path)))
    config = replace(config, model=replace(config.model, init="no-such-file"))
    with pytest.raises(NotMeasured, match="no-such-file"):
        cells.run(config, tmp_path / "cell")
    assert not (tmp_path / "cell" / "result.json").exists()
