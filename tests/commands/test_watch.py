"""`lockstep watch`: a journal followed as it grows, torn or not, until the run ends."""

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep import cli
from lockstep.commands.watch import describe, progress_of
from lockstep.distributed.files import LOCK, hold
from lockstep.monitoring.journal import Reader
from lockstep.monitoring.runs import RunSummary
from tests.monitoring.folders import ANY_VALUE, gone, locked, records, write

FAULTS: list[dict[str, Any]] = [
    {"kind": "fault", "time": 1015.0, "fault": "hang", "step": 7, "ranks": [1], "cause": "rank 1 is stopped"},
    {"kind": "fault", "time": 1016.0, "fault": "rollback", "step": 8, "back_to": 5, "skipped": [8], "cause": "nan"},
    {"kind": "fault", "time": 1017.0, "fault": "skip", "step": 9},
    {"kind": "stop", "time": 1019.0, "reason": "patience", "epoch": 1, "step": 40, "metric": "top1", "best": 0.75},
    {"kind": "law", "time": 1019.5, "step": 39, "message": "weights will differ between 1 and 2 processes"},
]


def journal(found: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in found)


def watched(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["watch", *line, "--every", "0.05"])
    out, err = capsys.readouterr()
    return end.value.code, err or out


def test_a_run_that_has_ended_is_told_from_its_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = records()
    code, text = watched(capsys, str(write(tmp_path, [first, *FAULTS, *others])))
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in text.splitlines()]
    assert code == 0
    assert lines == [
        f"run folder {tmp_path}",
        "digits: digits_net on digits, batch 64, 2 process(es), began 1970-01-01",
        "hang at step 7, rank(s) 1: rank 1 is stopped",
        "rollback at step 8: nan; back to step 5",
        "skip at step 9",
        "ends before its last epoch: --patience; the best top1 was 0.75",
        "weights will differ between 1 and 2 processes",
        "epoch 1/20: top-1 50.00%  loss 0.2500",
        "epoch 2/20: top-1 75.00%  loss 0.2500",
        "ended after 20.5 s, step 40",
    ]


@pytest.mark.parametrize(
    ("found", "code", "last"),
    [
        (
            records(status="failed", error="the loss became non-finite\nLower it"),
            1,
            "failed after 20.5 s, step 40, the loss",
        ),
        (records(status="interrupted"), 1, "stopped after"),
        (records(status=""), 1, "killed: its process is gone"),
        ([*records(status="failed"), *records()], 0, "ended after"),
    ],
)
def test_how_it_ends(found: Any, code: int, last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended, text = watched(capsys, str(write(tmp_path, found)))
    assert (ended, last in text.splitlines()[-1]) == (code, True), text


def test_a_run_is_followed_until_it_ends_through_a_failure_and_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", [])
    content = journal([*records(status="failed", error="lost"), *records(began=2000.0)])
    (folder / "journal.jsonl").unlink()
    begun = threading.Event()

    def train() -> None:
        with hold(folder):
            begun.set()
            with (folder / "journal.jsonl").open("ab", buffering=0) as file:
                for at in range(0, len(content), 997):  # in pieces that end anywhere
                    file.write(content[at : at + 997])
                    time.sleep(0.02)

    thread = threading.Thread(target=train)
    thread.start()
    begun.wait()
    code, text = watched(capsys, str(folder))
    thread.join()
    assert code == 0
    assert [line[9:] for line in text.splitlines() if "after" in line or "goes on" in line] == [
        "failed after 20.5 s, step 40, lost",
        "goes on from step 0 on 2 process(es); steps 1 to 40 are trained again",
        "ended after 20.5 s, step 40",
    ]  # fmt: skip
    assert text.count("epoch 1/20: top-1") == 2


def test_hostile_names_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "a\x1b[2J\u202e\udcff\r"
    config = {"recipe": bad, "model": {"model": bad}, "data": {"dataset": bad}, "batch_size": 1}
    fault = {"kind": "fault", "fault": bad, "cause": bad, "ranks": [bad], "step": 1}
    end = {"kind": "end", "status": bad, "error": bad, "steps": 1}
    law = {"kind": "law", "message": bad}
    folder = write(tmp_path / os.fsdecode(b"a\x1b[2J\xff"), [{"kind": "run", "config": config}, fault, law, end])
    code, text = watched(capsys, str(folder))
    assert code == 1
    assert len(text.splitlines()) == 5
    assert text.replace("\n", "").isprintable()
    assert text.count(r"a\x1b[2J") == 10


def test_one_look_at_a_run_on_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, records(status=""))
    locked(folder, gone(), host="another-host")
    code, text = watched(capsys, str(folder), "--once")
    assert (code, "killed" in text, "silent" in text) == (0, False, False)
    os.utime(folder / "journal.jsonl", (1000, 1000))
    (folder / "journal.jsonl").write_bytes(b"")
    os.utime(folder / "journal.jsonl", (1000, 1000))
    assert watched(capsys, str(folder), "--once")[0] == 0


def test_without_a_name_the_newest_that_runs(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert watched(capsys)[0] == 2
    assert "holds no run" in watched(capsys, "nowhere")[1]
    write(tmp_path / "runs/old", records(status="", began=1000.0))
    write(tmp_path / "runs/new", records(began=2000.0))
    assert "run folder runs/new\n" in watched(capsys)[1]
    with hold(tmp_path / "runs/old"):
        assert "run folder runs/old\n" in watched(capsys, "--once")[1]
    assert not (tmp_path / "runs/old" / LOCK).exists()


@pytest.mark.parametrize(("top5", "said"), [(1.0, "top-1 50.00%  loss"), (0.9, "top-1 50.00%  top-5 90.00%  loss")])
def test_top_5_is_told_where_it_says_something(top5: float, said: str, tmp_path: Path) -> None:
    record = {"kind": "eval", "epoch": 0, "top1": 0.5, "top5": top5, "loss": 1.0}
    assert said in describe(record, RunSummary(tmp_path))


SHARED = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SHARED
@given(st.lists(st.integers(0, 5000), max_size=6))
def test_a_journal_that_grows_in_any_pieces_gives_the_same_records(tmp_path: Path, cuts: list[int]) -> None:
    content = journal([*records(), *FAULTS])
    path = tmp_path / "journal.jsonl"
    reader, found = Reader(path), list[dict[str, Any]]()
    for end in [*sorted(cuts), len(content)]:
        path.write_bytes(content[:end])
        found += reader
    assert found == [json.loads(line) for line in content.splitlines()]
    path.write_bytes(content[:-100])  # a shorter one in its place
    assert list(Reader(path)) == list(reader) != []


@SHARED
@given(st.data())
def test_no_damage_makes_it_raise(tmp_path: Path, data: st.DataObject) -> None:
    found = [*records(error="why"), *FAULTS]
    run = RunSummary(tmp_path)
    for record in found:
        for name in data.draw(st.lists(st.sampled_from([key for key in record if key != "kind"]), max_size=2)):
            record[name] = data.draw(ANY_VALUE)
        assert "\n" not in describe(record, run)
        run.add(record)
        if (shown := progress_of(run)) is not None:
            assert shown[1] is None or 0 <= shown[1] <= 1
