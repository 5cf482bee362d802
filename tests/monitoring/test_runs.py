"""Runs as they are seen from outside: their state, and what is left of damaged journals."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.distributed.files import hold
from lockstep.monitoring.journal import Journal, Reader, kind_of
from lockstep.monitoring.runs import STATES, RunSummary, run_folders, summarize
from tests.monitoring.folders import ANY_VALUE, gone, locked, records, write

NOW = 5000.0
SHARED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def seen(folder: Path, now: float = NOW) -> RunSummary:
    run = summarize(folder, now)
    assert run is not None
    return run


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    run = seen(write(tmp_path / "run", records(tops=(0.5, 0.75, 0.7))))
    found = run.as_dict()
    del found["config"]
    assert found == {
        "folder": str(tmp_path / "run"), "state": "ended", "began": 1000.0, "since": 1061.0, "processes": 2,
        "epoch": 3, "epochs": 20, "step": 60, "top1": 0.7, "best_top1": 0.75, "loss": 0.25, "train_loss": 1 / 60,
        "lr": 0.1, "images_per_s": 1234.5, "seconds": 20.5, "resumes": 0, "resizes": 0, "faults": {}, "error": "",
    }  # fmt: skip
    assert (run.entry("recipe"), run.entry("data", "dataset"), run.entry("data", "gone"), run.entry("epochs")) == (
        "digits", "digits", "", "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "state"), [("completed", "ended"), ("interrupted", "stopped"), ("failed", "failed")]
)
def test_how_a_run_ended(status: str, state: str, tmp_path: Path) -> None:
    assert seen(write(tmp_path, records(status=status, error="a reason"))).state == state


def test_a_run_without_an_end_runs_or_was_killed(tmp_path: Path) -> None:
    folder = write(tmp_path, records(status=""))
    run = seen(folder)
    assert (run.state, run.since) == ("killed", 1040.0)  # the last sign of life
    with hold(folder):
        assert (seen(folder).state, seen(folder).since) == ("running", 1000.0)
    locked(folder, gone())
    assert seen(folder).state == "killed"
    locked(folder, os.getpid(), host="another-host")
    os.utime(folder / "journal.jsonl", (NOW, NOW))
    assert [seen(folder, NOW + age).state for age in (1.0, 899.0, 901.0)] == ["running", "running", "silent"]


def test_a_run_that_goes_on_runs_again(tmp_path: Path) -> None:
    fault = {"kind": "fault", "time": 1500.0, "fault": "hang", "step": 7, "ranks": [1], "cause": "stopped"}
    again = records(status="", tops=(0.8,), processes=1, began=2000.0)
    folder = write(tmp_path, [*records(status="failed"), fault, *again])
    with hold(folder):
        run = seen(folder)
    found = run.as_dict()
    expected = {"state": "running", "processes": 1, "resumes": 1, "faults": {"hang": 1}, "began": 2000.0}
    expected |= {"seconds": 20.5, "top1": 0.8, "error": ""}
    assert {name: found[name] for name in expected} == expected


def test_the_writer_s_lines_are_those_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's kind is known by the line's first bytes, as Journal writes them, so that few lines are parsed."""
    journal = Journal(tmp_path / "journal.jsonl")
    for record in records():
        journal.write({k: v for k, v in record.items() if k != "time"})  # type: ignore[arg-type]
    journal.close()
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines()
    assert [kind_of(line) for line in lines] == [record["kind"] for record in records()]
    parsed: list[bytes] = []
    parse = Reader.parse

    def noted(self: Reader, line: bytes) -> dict[str, Any] | None:
        parsed.append(line)
        return parse(self, line)

    monkeypatch.setattr(Reader, "parse", noted)
    assert seen(tmp_path).step == 40
    assert [kind_of(line) for line in parsed] == ["run", "eval", "eval", "end", "step", "end"]


def test_a_torn_journal_tells_what_is_whole_of_it(tmp_path: Path) -> None:
    content = b"".join(json.dumps(record).encode() + b"\n" for record in records())
    (tmp_path / "run").mkdir()
    for end in range(0, len(content), 31):
        (tmp_path / "run/journal.jsonl").write_bytes(content[:end])
        run = summarize(tmp_path / "run", NOW)
        whole = content[: end + 1].count(b"\n")  # without its line's end a record is whole
        assert (run is None) == (whole == 0)
        if run is not None:
            assert run.state == "killed"
            assert run.step == [None, 10, 20, 20, 20, 30, 40, 40, 40, 40][whole - 1]
            assert run.as_dict()["top1"] == (None if whole < 4 else 0.5 if whole < 8 else 0.75)


@SHARED
@given(st.data())
def test_no_damage_makes_it_raise(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(b"".join(json.dumps(record).encode() + b"\n" for record in records()))
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)))):
        content[place] = byte
    (tmp_path / "journal.jsonl").write_bytes(content[data.draw(st.integers(0, 50)) : data.draw(st.integers(50, 9999))])
    run = summarize(tmp_path, NOW)
    assert run is None or run.state in STATES


@SHARED
@given(st.data())
def test_no_value_in_any_field_makes_it_raise(tmp_path: Path, data: st.DataObject) -> None:
    found: list[dict[str, Any]] = records(status=data.draw(st.sampled_from(["", "completed"])), error="")
    for _ in range(data.draw(st.integers(1, 3))):
        record = data.draw(st.sampled_from(found))
        record[data.draw(st.sampled_from([name for name in record if name != "kind"] or ["none"]))] = data.draw(
            ANY_VALUE
        )
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    run = seen(tmp_path)
    for name in ("top1", "loss", "lr", "since", "began", "seconds"):
        assert isinstance(run.as_dict()[name], float | None), name


def test_what_is_nested_without_end_is_no_record(tmp_path: Path) -> None:
    deep = b'{"kind": "run", "config": ' + b'{"a":' * 500 + b"1" + b"}" * 501
    (tmp_path / "journal.jsonl").write_bytes(deep + b"\n")
    assert summarize(tmp_path, NOW) is None


def test_folders_of_others_are_passed_over(tmp_path: Path) -> None:
    run = write(tmp_path / "deep/er/run", records())
    write(run / "checkpoints/inside", records())  # below a run there is none
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/journal.jsonl").write_text('{"entry": "dear diary"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/journal.jsonl").touch()
    (tmp_path / "folder/journal.jsonl").mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "empty/fifo")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/journal.jsonl")
    found = [folder for folder in run_folders(tmp_path) if summarize(folder, time.time())]
    assert found == [run]
    assert list(run_folders(tmp_path / "nowhere")) == []
