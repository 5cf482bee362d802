"""`lockstep report`: what it makes of a journal, whole or damaged; nothing that a run holds gets out of its place."""

import json
import os
import re
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.commands.report.charts import axis
from lockstep.commands.report.history import Curve, History
from lockstep.commands.report.page import MOST_RUNS, Run, as_data, html, load_runs
from lockstep.errors import UserError
from lockstep.inference.mistakes import Mistake, Mistakes
from lockstep.monitoring.journal import Reader
from tests import inprocess
from tests.commands import reports
from tests.monitoring.folders import ANY_VALUE

VOID = {"meta", "link", "img", "input"}


class Page(HTMLParser):
    """A page's elements, attributes, texts and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.others: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.others.append(data)

    def unknown_decl(self, data: str) -> None:
        self.others.append(data)


def history(*records: dict[str, Any]) -> History:
    return History(Path("a run"), records)


def run(name: str = "a run", records: list[dict[str, Any]] | None = None, **more: Any) -> Run:
    found = history(*(reports.eventful() if records is None else records))
    return Run(name, f"runs/{name}", found.run.config, found, **more)


def page(*runs: Run) -> Page:
    return Page(html(runs, as_data(runs)))


def test_a_resize_is_told_in_a_line_and_is_no_loss() -> None:
    resized = {"kind": "resize", "time": 4.5, "step": 2, "before": 2, "processes": 3, "seconds": 0.75}
    again = reports.run(4.0, 3, 2) | {"resized_from": 2}
    found = history(reports.run(1.0), reports.step(3.0, 2), again, resized, reports.step(6.0, 4), reports.end(7.0, 4))
    assert [(start.processes, start.ended) for start in found.starts] == [(2, "resized"), (3, "completed")]
    sentences = [sentence for _, sentence in found.events]
    assert sentences[1:-1] == ["2 -> 3 processes at step 2, 0.8 s"]
    assert (found.trained_again, found.run.starts, found.run.resizes) == (0, 1, 1)
    assert (
        page(run(records=[reports.run(1.0), reports.step(3.0, 2), again, resized])).text.count("2 -> 3 processes") == 1
    )


def test_the_history_of_a_kill_a_resume_on_another_number_and_a_hang() -> None:
    found = history(*reports.eventful())
    assert [(s.processes, s.pause, s.seconds, s.ended) for s in found.starts] == [
        (2, 0.0, 2.0, ""), (1, 8.0, 11.5, "failed"), (2, 8.5, 3.0, "completed"),
    ]  # fmt: skip
    events = [sentence for _, sentence in found.events]
    assert len(events) == 6
    for sentence, said in zip(
        events,
        (
            "2 process(es), began ",
            "was killed, and goes on from step 2 on 1 process(es); steps 3 to 4 are trained again",
            "hang at step 6, rank(s) 1: rank 1 is silent", "failed after 9.0 s, step 6, top-1 50.00%, no progress",
            "goes on from step 6 on 2 process(es)", "ended after 9.0 s, step 10, top-1 50.00%",
        ),
        strict=True,
    ):  # fmt: skip
        assert said in sentence
    # a step that was trained again counts as of the last time; seconds leave the pauses of 8 s and 8.5 s out
    assert found.points("train loss") == [(2, 1.0, 1.0), (4, 3.0, 2.0), (5, 4.0, 3.0), (6, 7.0, 1.0), (10, 14.5, 1.0)]
    assert found.points("eval top1") == [(5, 6.0, 0.5), (10, 15.5, 0.75)]
    assert found.points("stall_ms") == [(2, 1.5, 500.0)]
    assert (found.trained_again, found.processes, found.work) == (2, [2, 1, 2], 16.5)
    assert [(step, seconds) for step, seconds, _ in found.resumes] == [(2, 2.0), (6, 13.5)]
    # the time that was spent adds up to that from the first to the last record
    assert sum(found.spent.values()) == pytest.approx(33.0)
    assert found.spent["between starts"] == pytest.approx(16.5)
    assert found.spent["evaluation"] == pytest.approx(3.0)
    assert found.spent["checkpoints"] == pytest.approx(0.5)
    assert found.spent["waiting for data"] == pytest.approx(0.12)  # 10 ms in each of 12 steps
    assert found.spent["waiting for gradients"] == pytest.approx(0.24)
    assert found.spent["training"] == pytest.approx(1.2 - 0.36)  # 12 steps of 10 samples at 100 a second


def test_a_restart_is_told_in_place_of_what_the_other_ranks_saw() -> None:
    restart = {"kind": "fault", "time": 3.0, "fault": "restart", "step": 2, "cause": "rank 1: killed", "processes": 1}
    failed = reports.end(2.5, 4, "failed", error="Connection reset by peer")
    found = history(reports.run(0.0), reports.step(2.0, 4), failed, restart, reports.run(5.0, 1, 2))
    assert [sentence for _, sentence in found.events][1:] == [
        "restart at step 2: rank 1: killed", "goes on from step 2 on 1 process(es); steps 3 to 4 are trained again",
    ]  # fmt: skip


def test_a_rollback_takes_the_steps_after_its_checkpoint_back() -> None:
    rollback = {"kind": "fault", "time": 4.0, "fault": "rollback", "step": 8, "back_to": 4, "cause": "nan"}
    found = history(reports.run(0.0), *(reports.step(float(n), 2 * n, loss=n) for n in (1, 2, 3)), rollback)
    assert [step for step, *_ in found.points("train loss")] == [2, 4]
    assert [sentence for _, sentence in found.events][1:] == ["rollback at step 8: nan; back to step 4"]
    assert found.trained_again == 2
    again = history(reports.run(0.0), reports.step(1.0, 6), rollback, reports.step(5.0, 6, loss=9.0))
    assert again.points("train loss") == [(6, 5.0, 9.0)]


def test_the_page_has_each_part() -> None:
    law = {"kind": "law", "time": 1032.5, "step": 10, "verdict": "holds", "sentence": "N changes nothing"}
    records = [*reports.eventful()[:-1], law | {"numbers": {"largest gap": 1.5}, "ranks": [2]}, reports.end(1033.0, 10)]
    picture = Mistake(13, "ant", "bee", 0.875, 28, b"\x89PNG...", "val/ant/\u732b.png")
    found = page(run(records=records, mistakes=Mistakes("", "best", 10, 4, "f" * 64, [], [picture]), damage="line 2"))
    for part in (
        "75.00%", "completed", "epoch 2 of 10", "2 step(s) were trained again", "Learning rate", "line 2",
        "goes on from step 2 on 1 process(es)", "hang at step 6, rank(s) 1: rank 1 is silent", "Where the time went",
        "precision", "Confusion matrix", "Most often confused", "bee", "a" * 64, "lockstep train digits",
        "torch 2.15.0", "2, then 1, then 2", "holds N changes nothing", "largest gap 1.5", "2 x cpu (AVX2)", "a note",
        "4 of 10 images (top-1 60.00%)", "ant predicted as bee, 87.5%", "val/ant/\u732b.png", "by epoch",
    ):  # fmt: skip
        assert part in found.text, part
    assert "sample 13" not in found.text
    assert "not what the run was trained on" not in found.text


def test_several_runs_stand_side_by_side_and_what_differs_is_named() -> None:
    other = reports.run(0.0, config={"optim": {"lr": 0.5}})
    del other["steps_per_epoch"]
    found = page(run(), run("another", [other, reports.step(1.0, 3)]))
    assert "optim.lr" in found.text
    assert "a run, training" in {value for _, name, value in found.attributes if name == "data-name"}
    boxes = {value for tag, name, value in found.attributes if tag == "input" and name == "id"}
    assert {"show-0", "show-1", "along-step", "along-time"} == boxes, "the other journal has no length of an epoch"
    same = page(run(), run("again"))
    assert "a run and again: equal weights, bit by bit." in same.text
    assert "The configs are the same." in same.text


@pytest.mark.parametrize(
    "records",
    [
        [],
        [reports.run(0.0)],
        [reports.step(1.0, 1, loss="nan")],
        [reports.run(0.0), reports.step(1.0, 1), reports.step(2.0, 2, loss="inf")],
        [reports.evaluation(1.0, 5, 0)],
        [{"kind": "classes", "classes": ["a"], "images": [1], "predicted": "x", "correct": [1]}],
        [{"kind": "law"}, {"kind": "law", "numbers": 3, "verdict": {}}],
        [reports.run(0.0), {"kind": "fault", "fault": "never heard of", "time": 1.0, "new": [1]}],
        [reports.run(0.0) | {"notes": 3, "versions": [1], "world": 1}, {"kind": "classes", "classes": 7}],
    ],
)
def test_runs_without_an_end_an_evaluation_or_sense_have_a_page(records: list[dict[str, Any]]) -> None:
    found = page(run("odd", records))
    assert "odd" in found.text
    assert "table" in found.tags


_hostile = st.text(max_size=12) | st.sampled_from(
    ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", '" onload="alert(1)', "<!--", "]]>",
     "'>&amp;", "</style><b>", "\u2028\u202e", "\x00\r\x1b[2J", "\udcff", "javascript:alert(1)", "{{ 7 * 7 }}",
     "{% raw %}")
)  # fmt: skip
TAGS = """html head meta title link style body main h1 h2 h3 p div section form fieldset legend label input span small
    figure figcaption svg g path text polyline circle details summary table caption thead tbody tr th td dl dt dd
    pre i ul li script img strong"""


@settings(max_examples=15, deadline=None)
@given(
    name=_hostile, other=_hostile, classes=st.lists(_hostile, min_size=2, max_size=3), cause=_hostile, value=_hostile
)
def test_nothing_that_a_run_holds_gets_out_of_its_place(
    name: str, other: str, classes: list[str], cause: str, value: str
) -> None:
    config = {"recipe": value, "optim": {"lr": value, other: value}, "model": {"model": value}, other: value}
    records = [
        reports.run(0.0, config=config) | {"notes": [cause], "devices": [other], "versions": {other: cause}},
        reports.step(1.0, 5),
        reports.evaluation(2.0, 5, 0),
        reports.classes(2.0, 5, classes),
        {"kind": "law", "verdict": value, "sentence": cause, "numbers": {other: cause, cause: [value]}, other: name},
        {"kind": "fault", "time": 3.0, "fault": value, "step": 5, "cause": cause},
        {"kind": "stop", "time": 3.0, "step": 5, "reason": other},
        reports.end(4.0, 5, status=value, error=cause, ledger_sha256=other),
    ]
    mistakes = Mistakes("", value, 3, 1, other, [(name, other, 1)], [Mistake(1, name, other, 0.5, 8, b"x", cause)])
    runs = (run(name, records, mistakes=mistakes, damage=cause), run(other + "2"))
    text = html(runs, as_data(runs))
    assert text.encode(), "it can be written"
    found = Page(text)
    assert found.tags <= set(TAGS.split())
    assert len(found.scripts) == 1
    assert not found.others
    assert {attr for _, attr, _ in found.attributes if attr.startswith("on")} == set()
    links = [value for _, attr, value in found.attributes if attr in ("href", "src", "srcset", "action")]
    assert all(link.startswith("data:") for link in links)
    styles = [value for _, attr, value in found.attributes if attr == "style"]
    assert all(re.fullmatch(r"[-a-z0-9:;%. ]+", style) for style in styles), styles
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


_names = st.sampled_from(sorted({name for record in reports.eventful() for name in record}))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_damage_to_a_journal_leaves_a_page(data: st.DataObject) -> None:
    records: list[dict[str, Any]] = json.loads(json.dumps(reports.eventful()))
    for _ in range(data.draw(st.integers(0, 6))):
        match data.draw(st.sampled_from(("lose", "twice", "garble", "strange"))):
            case "lose" if records:
                records.pop(data.draw(st.integers(0, len(records) - 1)))
            case "twice" if records:
                records.insert(0, records[data.draw(st.integers(0, len(records) - 1))])
            case "garble" if records:
                record = records[data.draw(st.integers(0, len(records) - 1))]
                record[data.draw(_names)] = data.draw(ANY_VALUE)
                record["kind"] = str(record.get("kind"))
            case _:
                records.append({"kind": data.draw(st.text(max_size=6)), "unknown": data.draw(ANY_VALUE)})
    found = run("damaged", records)
    assert all(seconds >= 0 for seconds in found.history.spent.values())
    assert json.dumps(as_data([found]), allow_nan=False)
    assert "damaged" in page(found).text


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.integers(3, 60), st.integers(1, 9), st.data())
def test_thinned_curves_keep_their_end_order_and_extremes(
    values: list[float], stretches: int, every: int, data: st.DataObject
) -> None:
    points = [(k * every, float(k), value) for k, value in enumerate(values)]
    curve = Curve(stretches)
    for point in points:
        curve.add(point)
    kept = curve.points
    assert len(kept) <= 2 * stretches + 1
    assert kept == sorted(set(kept))
    assert set(kept) <= set(points)
    assert kept[-1] == points[-1]
    assert kept == points or len(points) > stretches
    assert {max(v for *_, v in kept), min(v for *_, v in kept)} == {max(values), min(values)}
    curve.cut(step := data.draw(st.integers(-1, 300 * every)))
    assert curve.points == [point for point in kept if point[0] <= step]


@given(st.lists(st.floats(-1e12, 1e12), min_size=0, max_size=9), st.booleans())
def test_an_axis_holds_all_values_between_round_marks(values: list[float], zero: bool) -> None:
    found = axis(values, zero=zero)
    assert 2 <= len(found.marks) <= 12
    assert len({found.text(mark) for mark in found.marks}) == len(found.marks), found
    assert all(-1e-6 <= found.place(value) <= 1.0 + 1e-6 for value in values)
    assert all(-1e-6 <= axis(values, tight=True).place(value) <= 1 + 1e-6 for value in values)


def test_a_journal_of_any_length_takes_as_much_memory_and_a_page_below_two_megabytes(tmp_path: Path) -> None:
    def journal(epochs: int) -> Path:
        path = tmp_path / f"{epochs}.jsonl"
        with path.open("w") as file:
            file.write(json.dumps(reports.run(0.0)) + "\n")
            for epoch in range(epochs):
                for k in range(1, 51):
                    file.write(json.dumps(reports.step(50.0 * epoch + k, 50 * epoch + k, epoch, loss=k % 7)) + "\n")
                file.write(json.dumps(reports.evaluation(50.0 * epoch + 50, 50 * epoch + 50, epoch)) + "\n")
                skip = {"kind": "fault", "fault": "skip", "step": epoch, "time": 50.0 * epoch + 50}
                file.write((json.dumps(skip) + "\n") * 3)
            file.write(json.dumps(reports.classes(1e4, 10_000, [f"class {k} of a hundred" for k in range(100)])) + "\n")
        return path

    peaks = []
    for epochs in (30, 90):
        path = journal(epochs)
        tracemalloc.start()
        found = History(tmp_path, Reader(path))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
    assert found.events.count == 1 + 3 * 90
    short = History(tmp_path, Reader(path), 400 // MOST_RUNS)
    runs = [Run(f"run {k}", "x", found.run.config, short) for k in range(MOST_RUNS)]
    assert len(html(runs, as_data(runs)).encode()) < 2_000_000


def test_the_command_writes_the_page_and_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = reports.leave(tmp_path / os.fsdecode(b"a\x1b[2J\xff"), reports.eventful())
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    out, _ = inprocess.said(capsys, "report", folder, "--json", tmp_path / "a.json")
    assert r"a\x1b[2J\xff/report.html: 1 run(s), " in out
    assert "the pictures are missing: " in out
    assert "\x1b" not in out
    (found,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert (found["folder"], found["top1"], found["step"]) == (str(folder), 0.75, 10)
    assert found["curves"]["eval top1"] == [[5, 6.0, 0.5], [10, 15.5, 0.75]]
    assert found["damage"] == "journal.jsonl: line 17 can't be read and was left out"
    assert found["command"] == "lockstep train digits"
    assert r"a\x1b[2J\xff" in Page((folder / "report.html").read_text()).text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        load_runs([str(tmp_path)])
    with pytest.raises(UserError, match="report of 13 runs"):
        load_runs(["x"] * 13)
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(UserError, match="is no plain file"):
        load_runs([str(tmp_path)])


def test_names_are_as_short_as_they_can_be_told_apart(tmp_path: Path) -> None:
    folders = [reports.leave(tmp_path / place, []) for place in ("a/run", "b/run", "c")]
    assert [run.name for run in load_runs(list(map(str, folders)))] == ["a/run", "b/run", f"{tmp_path.name}/c"]
    assert [run.name for run in load_runs([str(folders[2])])] == ["c"]
