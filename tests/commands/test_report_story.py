"""What a report makes of a journal: attempts, faults, what was trained again, and where the time went."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.commands.report.curves import axis, duration, thinned, tight
from lockstep.commands.report.story import story
from tests.commands import reports


def test_the_story_of_a_kill_a_resume_on_another_number_and_a_hang() -> None:
    told = story(reports.eventful())
    assert [(a.processes, a.resumed_from, a.last_step, a.kept_to) for a in told.attempts] == [
        (2, 0, 4, 2),
        (1, 2, 6, None),
        (2, 6, 10, None),
    ]
    assert [(e.kind, e.step) for e in told.events] == [
        ("start", 0), ("lost", 4), ("resume", 2), ("fault", 6), ("lost", 6), ("resume", 6), ("end", 10),
    ]  # fmt: skip
    texts = " | ".join(event.text for event in told.events)
    assert "steps 3 to 4 are trained again" in texts
    assert "goes on from step 2 on 1 process |" in texts
    assert "hang: rank 1 is silent" in texts
    assert "failed: no progress" in texts
    # a step that was trained again counts as of the last time; seconds leave the pauses of 8 s and 8.5 s out
    assert told.train["loss"] == [(2, 1.0, 1.0), (4, 3.0, 2.0), (5, 4.0, 3.0), (6, 7.0, 1.0), (10, 14.5, 1.0)]
    assert told.evals["top1"] == [(5, 6.0, 0.5), (10, 15.5, 0.75)]
    assert (told.steps_per_epoch, told.end and told.end["steps"]) == (5.0, 10)
    assert told.stalls == [(2, 1.5, 500.0)]


def test_why_processes_were_started_again_is_told_in_place_of_what_the_others_lost() -> None:
    restart = {"kind": "fault", "time": 3.0, "fault": "restart", "step": 2, "cause": "rank 1: killed", "processes": 1}
    failed = reports.end(2.5, 4, "failed", error="Connection reset by peer")
    told = story(
        [reports.run(0.0), reports.step(2.0, 4), failed, restart, reports.run(5.0, 1, 2), reports.step(6.0, 4)]
    )
    assert [(e.kind, e.step, e.text) for e in told.events][1] == (
        "lost", 4, "rank 1: killed; its processes are started again; steps 3 to 4 are trained again"
    )  # fmt: skip
    assert "Connection" not in str(told.events)


def test_the_time_that_was_spent_adds_up_to_that_from_the_first_to_the_last_record() -> None:
    spent = story(reports.eventful()).spent
    assert sum(spent.values()) == pytest.approx(33.0)
    assert spent["between attempts"] == pytest.approx(16.5)
    assert spent["evaluation"] == pytest.approx(3.0)
    assert spent["checkpoint stalls"] == pytest.approx(0.5)
    assert spent["training that was done again"] == pytest.approx(0.2)  # 2 steps of 10 samples at 100 a second
    assert spent["hanging"] == pytest.approx(6.0)
    assert spent["waiting for data"] == pytest.approx(0.1)  # 10 ms in each of 10 steps
    assert spent["waiting for gradients of others"] == pytest.approx(0.2)


def test_a_rollback_takes_the_steps_after_its_checkpoint_back() -> None:
    rollback = {
        "kind": "fault",
        "time": 4.0,
        "fault": "rollback",
        "step": 8,
        "back_to": 4,
        "skipped": [8],
        "error": "nan",
    }
    told = story([reports.run(0.0), *(reports.step(float(n), 2 * n, loss=n) for n in (1, 2, 3)), rollback])
    assert [point[0] for point in told.train["loss"]] == [2, 4]
    assert [e.text for e in told.events if e.kind == "fault"] == ["rollback to step 4: nan"]
    again = story([reports.run(0.0), reports.step(1.0, 6), rollback, reports.step(5.0, 6, loss=9.0)])
    assert [(point[0], point[2]) for point in again.train["loss"]] == [(6, 9.0)]


_plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_json = _plain | st.lists(_plain, max_size=3) | st.dictionaries(st.text(max_size=5), _plain, max_size=3)
_names = st.sampled_from(sorted({name for record in reports.eventful() for name in record}))


@settings(max_examples=40)
@given(st.data())
def test_any_damage_to_a_journal_leaves_a_story(data: st.DataObject) -> None:
    records: list[dict[str, Any]] = json.loads(json.dumps(reports.eventful()))
    for _ in range(data.draw(st.integers(0, 6))):
        match data.draw(st.sampled_from(("lose", "twice", "garble", "strange"))):
            case "lose" if records:
                records.pop(data.draw(st.integers(0, len(records) - 1)))
            case "twice" if records:
                records.insert(0, records[data.draw(st.integers(0, len(records) - 1))])
            case "garble" if records:
                record = records[data.draw(st.integers(0, len(records) - 1))]
                record[data.draw(_names)] = data.draw(_json)
                record["kind"] = str(record.get("kind"))
            case _:
                records.append({"kind": data.draw(st.text(max_size=6)), "unknown": data.draw(_json)})
    told = story(records)
    assert all(seconds >= 0 for seconds in told.spent.values())
    assert all(len({step for step, _, _ in series}) == len(series) for series in told.train.values())


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.integers(4, 60))
def test_thinned_curves_keep_their_ends_order_and_extremes(values: list[float], limit: int) -> None:
    points = [(float(k), value) for k, value in enumerate(values)]
    kept = thinned(points, limit)
    assert len(kept) <= max(limit, 0)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert set(kept) <= set(points)
    if len(points) <= limit:
        assert kept == points
    else:
        assert max(v for _, v in kept) == max(values)
        assert min(v for _, v in kept) == min(values)


@given(st.lists(st.floats(-1e12, 1e12), min_size=0, max_size=9), st.booleans())
def test_an_axis_holds_all_values_between_round_marks(values: list[float], zero: bool) -> None:
    found = axis(values, zero=zero)
    assert 2 <= len(found.marks) <= 12
    assert len({found.text(mark) for mark in found.marks}) == len(found.marks), found
    assert all(-1e-6 <= found.place(value) <= 1.0 + 1e-6 for value in values)
    narrow = tight(values, "")
    assert all(-1e-6 <= narrow.place(value) <= 1 + 1e-6 for value in values)


def test_durations_are_said_in_two_units() -> None:
    times = (0.04, 45, 200, 7500, 273_600)
    assert [duration(s).replace("\N{NO-BREAK SPACE}", " ") for s in times] == [
        "0.0 s",
        "45 s",
        "3 min 20 s",
        "2 h 05 min",
        "3 d 4 h",
    ]


def test_a_report_of_the_journal_as_a_file(tmp_path: Path) -> None:
    from lockstep.commands.report.runs import runs

    folder = reports.leave(tmp_path / "torn", reports.eventful())
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    (told,) = runs([str(folder)])
    assert told.story.damaged == 1
    assert told.command == "lockstep train digits"
