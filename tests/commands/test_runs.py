"""`lockstep runs` and `lockstep diff`: tables of what runs' folders tell, at any width, of any folder."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from lockstep.commands.runs import Listing, ago
from lockstep.commands.shared.grid import Column, fitted
from lockstep.config.recipes import recipe
from lockstep.monitoring.runs import summarize
from tests import inprocess
from tests.monitoring.folders import gone, locked, records, write

NAMES = ("since", "name", "recipe", "processes", "epoch", "top1", "best", "loss", "state")


def said(capsys: pytest.CaptureFixture[str], *line: str, code: int = 0) -> str:
    out, err = inprocess.said(capsys, *line, code=code)
    assert bool(err) == (code == 2)
    return err or out


def test_a_journal_of_which_nothing_is_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", records())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "journal.jsonl").write_text('{"kind": "run", "ti')
    out, err = inprocess.said(capsys, "runs", str(tmp_path))
    assert (names(out), err) == (["a"], f"1 journal(s) hold nothing that can be read: {tmp_path / 'b'}\n")


@pytest.fixture
def five(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    write(runs / "digits-a", records(began=1000, tops=[0.9]))
    write(runs / "digits-b", records(began=2000, status="failed", error="no", tops=[0.5]))
    write(runs / "more/mnist-c", records(recipe("mnist"), began=3000, status="interrupted", processes=4))
    locked(write(runs / "digits-d", records(began=4000, status="", tops=[])), gone())
    locked(write(runs / "digits-e", records(began=5000, status="", tops=[0.95])), os.getpid())
    return runs


def names(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()[1:] if not line.startswith("(")]


def test_the_table_has_a_line_a_run_the_newest_first(five: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "runs", str(five), "--wide")
    assert names(text) == ["digits-e", "digits-d", "more/mnist-c", "digits-b", "digits-a"]
    states = {line.split()[0]: line for line in text.splitlines()[1:]}
    for name, state in zip("edba", ("running", "killed", "failed", "ended"), strict=True):
        assert f" {state} " in states[f"digits-{name}"]
    assert states["more/mnist-c"].split()[1:6] == ["mnist", "4", "2/14", "75.00%", "75.00%"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--state running,failed", ["digits-e", "digits-b"]),
        ("--recipe mnist", ["more/mnist-c"]),
        ("--match mnist", ["more/mnist-c"]),
        ("--sort top1", ["digits-e", "digits-a", "more/mnist-c", "digits-b", "digits-d"]),
        ("--sort top1 --reverse --limit 2", ["digits-b", "more/mnist-c"]),
        ("--sort name --limit 1", ["digits-a"]),
        ("--sort processes --limit 4 --reverse", ["more/mnist-c", "digits-e", "digits-d", "digits-b"]),
    ],
)
def test_filters_and_orders(flags: str, expected: list[str], five: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names(said(capsys, "runs", *flags.split(), str(five))) == expected


@pytest.mark.parametrize("by", NAMES)
def test_every_order_lists_every_run_and_the_unknown_last(by: str, five: Path) -> None:
    found = [run for folder in five.rglob("*") if (run := summarize(folder, 6000.0))]
    for reverse in (False, True):
        ordered = Listing(sort=by, reverse=reverse).ordered(found)  # type: ignore[arg-type]
        assert len(ordered) == 5
        if by in ("top1", "best", "loss", "epoch"):
            assert ordered[-1].folder.name == "digits-d"


def test_json_tells_all(five: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "runs", "--json", "--sort", "name", str(five)))
    assert [Path(run["folder"]).name for run in found] == ["digits-a", "digits-b", "digits-d", "digits-e", "mnist-c"]
    assert (found[1]["error"], found[4]["config"]["recipe"], found[2]["top1"]) == ("no", "mnist", None)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_table_fits(width: int, five: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    write(five / f"{'very-' * 30}long", records())
    monkeypatch.setenv("COLUMNS", str(width))
    lines = said(capsys, "runs", str(five)).splitlines()
    assert all(cell_len(line) <= width for line in lines[:-1])
    for title in ("run", "N", "epoch", "top-1", "state", "since"):
        assert title in lines[0]
    assert width == 160 or lines[-1].endswith("--wide, or --json)")
    monkeypatch.setenv("COLUMNS", "60")
    assert len(said(capsys, "runs", str(five), "--wide").splitlines()[0]) > 150


def test_places_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "runs").startswith("no runs below runs")
    assert said(capsys, "runs", "--json") == "[]\n"
    assert "there is no folder gone" in said(capsys, "runs", "gone", code=2)
    assert "unknown state 'runing'" in said(capsys, "runs", "--state", "runing", code=2)
    write(tmp_path / "runs/a", records())
    assert said(capsys, "runs", "--state", "running") == "none of 1 runs is like that\n"
    assert names(said(capsys, "runs", "runs/a")) == ["a"]


def test_hostile_names_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = replace(recipe("digits"), recipe="x\x1b]0;title\x07\u202e")
    a = str(write(tmp_path / "a\x1b[2J\nb", records(hostile)))
    b = str(write(tmp_path / os.fsdecode(b"\xff\xfe"), records()))
    lines = [("runs", str(tmp_path), *flags) for flags in ([], ["--json"], ["--wide"])]
    lines += [("diff", a, b), ("diff", a, b, "--json"), ("diff", a, b, "--wide")]
    for line in lines:
        text = said(capsys, *line)
        assert not re.search("[\x1b\x07\r\u202e]", text), line
        assert text.encode(), "it can be written"
    assert r"a\x1b[2J\nb  ->  " in said(capsys, "diff", a, b)
    assert r"\xff\xfe" in said(capsys, "runs", str(tmp_path))
    assert r"no folder a\x1b[2J" in said(capsys, "runs", "a\x1b[2J", code=2)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.text(max_size=30), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(20, 120))
def test_any_table_keeps_its_width_and_its_first_columns(rows: list[list[str]], width: int) -> None:
    one, two, three = zip(*rows, strict=True)
    columns = [Column("one", one, left=True), Column("two", two, 1), Column("three", three, 2, left=True)]
    lines, left_out = fitted(columns, width)
    assert len(lines) == len(rows) + 1
    assert all(cell_len(line) <= width for line in lines)
    assert left_out == ["three", "two"][: len(left_out)]
    assert all(line.rstrip() == line for line in lines)
    assert fitted(columns, None)[1] == []


def test_times_are_told_in_one_unit() -> None:
    told = [ago(1000.0 - seconds, 1000.0) for seconds in (-5, 0.4, 59.4, 60, 3599, 3600, 86399, 86400, 9e8)]
    assert told == ["0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 d", "10,416 d"]


def test_diff_of_a_run_with_itself_and_another_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(write(tmp_path / "a", records()))
    b = str(
        write(tmp_path / "b", records(recipe("digits").with_execution(nproc=1), processes=1, weights_sha256="d" * 64))
    )
    assert said(capsys, "diff", a, a).splitlines()[1:] == [
        f"{part}: the same" for part in ("experiment", "order", "where and how", "environment", "result")
    ]
    text = said(capsys, "diff", a, b)
    assert "experiment: the same\norder: the same\nwhere and how:\n" in text
    assert "execution.nproc" in text
    assert "dddddddddddd" in text
    said(capsys, "diff", a, b, "--strict", code=1)


def test_diff_of_two_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(write(tmp_path / "a", records()))
    b = str(
        write(tmp_path / "b", records(replace(recipe("digits"), seed=7), ledger_sha256="beef" * 16, tops=(0.5, 0.8)))
    )
    found = json.loads(said(capsys, "diff", a, b, "--json", code=1))
    assert found["differs"]["experiment"] == {"seed": ["0", "7"]}
    assert found["differs"]["order"] == {"ledger": ["5a63b02a5a63", "beefbeefbeef"]}
    assert found["differs"]["result"] == {"top-1": ["75.00%", "80.00%"]}
    shorter = str(write(tmp_path / "c", records(replace(recipe("digits"), seed=7), tops=(0.5,))))
    assert json.loads(said(capsys, "diff", a, shorter, "--json", code=1))["differs"]["order"] == {"seed": ["0", "7"]}


@pytest.mark.parametrize("line", ["diff", "diff a", "diff a b c", "diff a gone", "diff a empty"])
def test_what_diff_can_t_compare(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", records())
    (tmp_path / "empty").mkdir()
    assert said(capsys, *line.split(), code=2).startswith("lockstep: ")


def test_diff_of_torn_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", records()), write(tmp_path / "b", records())
    content = (b / "journal.jsonl").read_bytes()
    for end in range(0, len(content), 97):
        (b / "journal.jsonl").write_bytes(content[:end])
        assert "experiment" in said(capsys, "diff", str(a), str(b), code=0 if b"\n" in content[:end] else 1)
