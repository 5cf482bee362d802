"""The report's page says what its JSON says, needs nothing else, and nothing that a run holds gets out of its place."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.commands.report.as_json import plain
from lockstep.commands.report.page import html
from lockstep.commands.report.runs import MOST_RUNS, Told, command_of, runs
from lockstep.commands.report.story import story
from lockstep.commands.shared.markup import embedded_json, tag
from lockstep.errors import UserError
from tests.commands import reports

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


def _told(name: str = "a run", records: list[dict[str, Any]] | None = None) -> Told:
    records = reports.eventful() if records is None else records
    config: dict[str, Any] = next((r["config"] for r in records if r["kind"] == "run"), {})
    return Told(name, f"runs/{name}", config, *command_of(config), story(records))


def test_the_page_has_each_part_and_its_json_is_the_report() -> None:
    told = [_told()]
    page = Page(html(told))
    assert json.loads(page.scripts[0]) == json.loads(json.dumps(plain(told, 400)))
    said = " ".join(" ".join(page.texts).split())
    for part in (
        "75.00%", "completed", "Learning rate", "goes on from step 2 on 1 process", "hang: rank 1 is silent",
        "steps 3 to 4 are trained again", "Where the time went", "precision", "Confusion matrix", "bee", "a" * 64,
        "lockstep train digits", "torch 2.15.0", "2, then 1, then 2", "training that was done again",
    ):  # fmt: skip
        assert part in said, part


def test_several_runs_stand_side_by_side_and_what_differs_is_named() -> None:
    other = _told("another", [reports.run(0.0, config={"optim": {"lr": 0.5}}), reports.step(1.0, 3)])
    page = Page(html([_told(), other]))
    said = " ".join(page.texts)
    assert "optim.lr" in said
    assert "a run, training" in said
    boxes = {value for tag, name, value in page.attributes if tag == "input" and name == "id"}
    assert {"show-0", "show-1", "along-step", "along-time", "theme-dark"} <= boxes
    assert "along-epoch" not in boxes  # the other run's journal does not tell how long an epoch is


@pytest.mark.parametrize(
    "records",
    [
        [],
        [reports.run(0.0)],
        [reports.step(1.0, 1, loss="nan")],
        [reports.run(0.0), reports.step(1.0, 1), reports.step(2.0, 2, loss="inf")],
        [reports.evaluation(1.0, 5, 0)],
        [{"kind": "classes", "classes": ["a"], "images": [1], "predicted": "x", "right": [1]}],
        [reports.run(0.0), {"kind": "fault", "fault": "never heard of", "time": 1.0, "new": [1]}],
    ],
)
def test_runs_without_an_end_an_evaluation_or_sense_have_a_page(records: list[dict[str, Any]]) -> None:
    page = Page(html([_told("odd", records)]))
    assert any("odd" in said for said in page.texts)
    assert "table" in page.tags


_hostile = st.text(max_size=12) | st.sampled_from(
    ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", '" onload="alert(1)', "<!--", "]]>",
     "'>&amp;", "</style><b>", "\u2028\u202e", "\x00\r", "\udcff", "javascript:alert(1)", "</title>", "$title")
)  # fmt: skip
TAGS = """html head meta title link style body main h1 h2 h3 p div section form fieldset legend label input span small
    figure figcaption svg g path text polyline circle details summary table caption thead tbody tr th td dl dt dd
    pre i ul li script img"""


@settings(max_examples=15)
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
        {"kind": "fault", "time": 3.0, "fault": value, "step": 5, "cause": cause},
        {"kind": "stop", "time": 3.0, "step": 5, "reason": other},
        reports.end(4.0, 5, status=value, error=cause, ledger_sha256=other),
    ]
    told = [_told(name, records), _told(other + "2")]
    page = Page(html(told))
    assert page.tags <= set(TAGS.split())
    assert len(page.scripts) == 2
    assert not page.others
    assert {attr for _, attr, _ in page.attributes if attr.startswith("on")} == set()
    links = [value for _, attr, value in page.attributes if attr in ("href", "src", "srcset", "action")]
    assert all(link.startswith("data:") for link in links)
    styles = [value for _, attr, value in page.attributes if attr == "style"]
    assert all(re.fullmatch(r"[-a-z0-9:;%. ]+", style) for style in styles), styles
    assert json.loads(page.scripts[0]) == json.loads(json.dumps(plain(told, 200)))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | _hostile, lambda i: st.lists(i) | st.dictionaries(_hostile, i)
    )
)
def test_json_in_a_page_comes_back(value: Any) -> None:
    block = embedded_json({"value": value}, "x")
    page = Page(f"<body>{block}</body>")
    assert json.loads(page.scripts[0]) == {"value": value}
    assert re.fullmatch(r"[^<>]*<script[^<>]*>[^<>]*</script>", block)


def test_markup_escapes_text_and_attributes() -> None:
    assert tag("p", "<b>", tag("i", 1.50), class_='"x"', hidden=True, lang=None) == (
        '<p class="&quot;x&quot;" hidden>&lt;b&gt;<i>1.5</i></p>'
    )


def test_thousands_of_records_of_a_dozen_runs_make_a_page_below_two_megabytes() -> None:
    many = [reports.run(0.0)]
    for epoch in range(100):
        many += [reports.step(float(100 * epoch + k), 100 * epoch + k, epoch, loss=k % 7) for k in range(1, 101)]
        many.append(reports.evaluation(100.0 * epoch + 100, 100 * epoch + 100, epoch))
    many.append(reports.classes(1e4, 10_000, [f"class {k} of a hundred" for k in range(100)]))
    one = _told("run", many)
    page = html([replace(one, name=f"run {k}") for k in range(MOST_RUNS)])
    assert len(page.encode()) < 2_000_000


def test_the_command_writes_the_page_and_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = reports.leave(tmp_path / "a", reports.eventful())
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder), "--json", str(tmp_path / "a.json")])
    assert ended.value.code == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    page = Page((folder / "report.html").read_text())
    assert json.loads(page.scripts[0]) == json.loads((tmp_path / "a.json").read_text())


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        runs([str(tmp_path)])
    with pytest.raises(UserError, match="report of 13 runs"):
        runs(["x"] * 13)


def test_names_are_as_short_as_they_can_be_told_apart(tmp_path: Path) -> None:
    folders = [reports.leave(tmp_path / place, []) for place in ("a/run", "b/run", "c")]
    assert [told.name for told in runs(list(map(str, folders)))] == ["a/run", "b/run", f"{tmp_path.name}/c"]
    assert [told.name for told in runs([str(folders[2])])] == ["c"]
