"""What the measuring commands share: turns, folders, intervals, tables, and who else computed meanwhile."""

import csv
import json
import math
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.commands import measuring
from lockstep.commands.measuring import NotMeasured, Row
from lockstep.commands.shared.grid import Column
from lockstep.config import Config, Execution
from lockstep.config.recipes import recipe
from lockstep.errors import UserError


def test_rows_take_turns_and_one_that_fails_is_left_out() -> None:
    calls, said, rows = list[str](), list[str](), [Row(name, Config(), "", {}) for name in "abc"]

    def measure(row: Row, number: int) -> dict[str, Any]:
        calls.append(f"{row.name}{number}")
        if row.name == "b":
            raise NotMeasured("rank 1 failed: out of memory")
        return {"n": number}

    measuring.run_rounds(rows, 3, measure, said.append)
    assert calls == ["a1", "b1", "c1", "c2", "a2", "a3", "c3"], "every other round backwards"
    assert [row.failed for row in rows] == ["", "rank 1 failed: out of memory", ""]
    assert rows[0].rounds == {1: {"n": 1}, 2: {"n": 2}, 3: {"n": 3}}
    assert "b can't be measured: rank 1 failed: out of memory" in said


def test_a_folder_is_taken_over_under_the_same_conditions_alone(tmp_path: Path) -> None:
    config = Config().with_execution(out=str(tmp_path / "c"))
    assert measuring.claim("compare", config, {"cores": 2}) == tmp_path / "c"
    assert measuring.claim("compare", config, {"cores": 2}) == tmp_path / "c"
    for other, place, named in (
        (replace(config, seed=1), {"cores": 2}, r"config\.seed: 0 -> 1"),
        (config, {"cores": 4}, "cores: 2 -> 4"),
    ):
        with pytest.raises(UserError, match=rf"other conditions.*\n    {named}\n  Name another folder"):
            measuring.claim("compare", other, place)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    with pytest.raises(UserError, match="not empty"):
        measuring.claim("compare", config.with_execution(out=str(tmp_path / "other")), {})
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine"]


def test_what_is_stopped_says_how_it_goes_on(tmp_path: Path) -> None:
    said = list[str]()
    with pytest.raises(KeyboardInterrupt), measuring.resumable(tmp_path / "a b", said.append):
        raise KeyboardInterrupt
    assert said == [f"stopped; the same command with --out '{tmp_path}/a b' goes on with what is missing"]


def test_the_command_s_own_message_is_the_reason() -> None:
    said = "Traceback ...\nValueError: inner\nlockstep: rank 1 failed: inner\n  Do this.\n"
    assert measuring.printed_error(said) == "rank 1 failed: inner"
    assert measuring.printed_error("only this\n\n") == "only this"
    assert measuring.printed_error("") == "it printed nothing"


@pytest.mark.slow
def test_a_run_s_own_message_is_why_it_was_not_measured(tmp_path: Path) -> None:
    config = replace(recipe("digits"), execution=Execution(device="cpu", nproc=1, data_dir=str(tmp_path)))
    config = replace(config, model=replace(config.model, init="no-such-file"))
    with pytest.raises(NotMeasured, match="no-such-file"):
        measuring.train_in(tmp_path / "cell", config)


def test_the_interval_of_a_median_is_that_of_a_binomial() -> None:
    low, high = measuring.interval([float(n) for n in range(1, 42)])  # the exact order-statistic interval is 14 ... 28
    assert 13 <= low <= 16
    assert 26 <= high <= 29
    assert measuring.median_of([1.0]) == {"median": 1.0, "low": None, "high": None}
    assert measuring.median_of([1.0, None]) is measuring.median_of([]) is None


def test_the_interval_of_a_mean_is_students() -> None:
    half = 4.303 / math.sqrt(3)
    assert measuring.mean_of([1.0, 2.0, 3.0]) == pytest.approx({"mean": 2.0, "low": 2 - half, "high": 2 + half})
    assert measuring.mean_of([1.0]) == {"mean": 1.0, "low": None, "high": None}
    assert measuring.mean_of([]) is None
    draw, hits = random.Random(0), 0
    for _ in range(2000):  # it holds the mean in 95 % of cases, with a standard error of 0.5 %
        found = measuring.mean_of([draw.gauss(0, 1) for _ in range(4)])
        assert found is not None
        hits += (found["low"] or 0) <= 0 <= (found["high"] or 0)
    assert hits / 2000 == pytest.approx(0.95, abs=0.02)


def test_figures_as_they_are_written() -> None:
    found: measuring.Figure = {"median": 0.1234, "low": 0.12, "high": 0.13}
    assert measuring.written(found) == "0.123 [0.120, 0.130]"
    assert measuring.written(found, 1, percent=True) == "12.3 % [12.0, 13.0]"
    assert measuring.written({"mean": 2.0, "low": None, "high": None}, 2, sign="+") == "+2.00"
    assert measuring.written({"mean": 5446.0, "low": None, "high": None}) == "5,446"
    assert measuring.written(None) == "\N{EN DASH}"


def test_the_csv_holds_the_numbers_of_the_json(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a, b", "speed": {"median": 0.1, "low": 0.05, "high": 0.2}, "memory": [1.0]},
        {"name": "c", "speed": None, "more": 3},
    ]
    measuring.write_results(tmp_path, {"rows": rows})
    assert json.loads((tmp_path / "results.json").read_text()) == {"rows": rows}
    first, second = csv.DictReader((tmp_path / "table.csv").read_text().splitlines())
    assert first == {"name": "a, b", "speed.median": "0.1", "speed.low": "0.05", "speed.high": "0.2", "more": ""}
    assert second == dict.fromkeys(first, "") | {"name": "c", "more": "3"}


@pytest.mark.parametrize("width", [20, 200])
def test_a_narrow_terminal_shows_fewer_columns_whole(width: int, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    columns = [Column("name", ["a", "b"], left=True), Column("speed", ["1 [0, 2]", "\N{EN DASH}"])]
    measuring.show([*columns, Column("spare", ["x" * 20, "y"], 1)], ["below"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["a", "1"]
    assert lines[2].split() == ["[0,", "2]"], "an interval is under its value"
    assert lines[3].split()[:2] == ["b", "\N{EN DASH}"]
    assert ("(too narrow for spare)" in lines) == (width == 20)
    assert lines[-1] == "below"


def test_others_are_those_that_this_process_did_not_start() -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        used = psutil.Process(stranger.pid).cpu_times
        others, began = measuring.watch_others(), time.monotonic()
        while used().user < 0.6:
            time.sleep(0.05)
        seen = others() * (time.monotonic() - began)
    finally:
        stranger.kill()
        stranger.wait()
    assert seen > 0.4  # core seconds: it is not counted as ours before it has ended
    assert measuring.busy(0.1) == ""
    assert "1.5 cores" in measuring.busy(1.5)


def test_a_speed_up_beyond_the_ideal_is_doubted() -> None:
    assert measuring.beyond(2.5, 2) == ""  # caches
    assert "a speed-up of 2.7 is more than its processes can give" in measuring.beyond(2.7, 2)
