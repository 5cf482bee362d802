"""Tables keep what they are given, and the page shows every result once."""

import json
import re
from pathlib import Path

import against
import cifar10_speed
import exact
import page
import pytest
from common import RESULTS, cell, print_table, table
from hypothesis import given
from hypothesis import strategies as st

import checkpoint

CELLS = st.one_of(
    st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text("abc|1.", max_size=5)
)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=4)))
def test_a_table_is_the_same_after_json_and_shows_every_cell(rows: list[list[object]]) -> None:
    made = table("title", [f"c{i}" for i in range(len(rows[0]))], rows, ["note"])
    assert json.loads(json.dumps(made)) == made
    lines = page.markdown(made).splitlines()
    body = [line for line in lines if line.startswith("|")][2:]
    assert len(body) == len(rows)
    for line, row in zip(body, rows, strict=True):
        for value in row:
            assert cell(value).replace("|", "\\|") in line
        assert line.replace("\\|", "").count("|") == len(row) + 1  # no cell breaks the row apart


def test_a_torn_row_is_refused() -> None:
    with pytest.raises(ValueError, match="2 columns, but a row of 1"):
        table("t", ["a", "b"], [["x", 1], ["y"]])


def test_the_terminal_shows_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    made = table("t", ["side", "us"], [["raw", 55.0], ["lockstep", 1234567]], ["a note"])
    print_table(made)
    out = capsys.readouterr().out
    assert "55" in out
    assert "1,234,567" in out
    assert "a note" in out
    widths = {len(line) for line in out.strip().splitlines()[1:4]}
    assert len(widths) == 1


def test_the_page_has_every_kept_result_and_each_environment_once() -> None:
    results = page.read(RESULTS)
    text = page.page(results)
    for stem, result in results.items():
        assert f"{stem}.json" in text
        assert page.described(result.get("environment", {})) in text
        for each in result["tables"]:
            assert f"### {each['title']}\n" in text
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(heads) == len(set(heads))
    for line in text.splitlines():
        if line.startswith("`python "):
            assert (RESULTS.parent / line.split("`")[1].split("/")[1]).exists(), line


def test_the_kept_pages_are_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["page.py", "--out", str(tmp_path / "benchmarks.md")])
    page.main()
    for name in ("benchmarks.md", "zh/benchmarks.md"):
        assert (tmp_path / name).read_text() == (RESULTS.parents[1] / "docs" / name).read_text(), name


def test_all_that_the_results_say_has_its_chinese() -> None:
    words = page.chinese()
    known = page.Words(texts=dict.fromkeys(words.texts, "known"))
    assert set(words.aims) == set(page.AIMS)
    for result in page.read(RESULTS).values():
        for each in result["tables"]:
            for text in filter(None, [each["title"], *each["columns"], *each["notes"]]):
                assert known.told(text) == "known", text
                there = words.told(text)
                assert sorted(re.findall(r"[\d.,]*\d", there)) == sorted(re.findall(r"[\d.,]*\d", text))


def test_what_varies_keeps_its_place_and_the_unknown_stays() -> None:
    words = page.Words(texts={"{} rounds": "{} 轮", "{} of {} rounds": "{} / {} 轮", "raw": "手写"})
    assert words.told("3 of 10 rounds") == "3 / 10 轮"
    assert words.told("raw") == "手写"
    assert words.told("raw again") == "raw again"


def test_a_result_without_tables_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.json").write_text("{}")
    (tmp_path / "new.json").write_text(json.dumps({"tables": [table("t", ["a"], [["x"]])]}))
    assert list(page.read(tmp_path)) == ["new"]
    assert "old.json has no tables" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "script"), [("exact", exact), ("checkpoint-cpu", checkpoint)])
def test_kept_tables_are_those_of_the_kept_figures(name: str, script: object) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert result["tables"] == script.tables(result)  # type: ignore[attr-defined]


def test_seeds_come_with_their_mean_and_spread() -> None:
    one = {"images_per_s": 900.0, "threads": 2, "peak_memory_gib": 3.0}
    runs = [{"seed": seed, "top1": 0.93 + seed / 100, "seconds": 400.0 + seed, **one} for seed in range(3)]
    *rows, mean = cifar10_speed.tables(runs)[0]["rows"]
    assert [row[1] for row in rows] == ["93.00%", "94.00%", "95.00%"]
    assert mean[1:3] == ["94.00% (standard deviation 1.00%)", 401]
    assert cifar10_speed.tables(runs[:1])[0]["rows"][-1][1] == "93.00%"


def test_two_trees_are_compared_round_by_round_and_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def side(tree: Path, part: str) -> dict[str, float]:
        asked.append((part, tree.name))
        return {f"{part} ms": len(asked) * (1.0 if tree.name == "old" else 0.5)}

    monkeypatch.setattr(against, "side", side)
    figures = against.measure({"abc": Path("old"), "now": Path("new")}, ["start"], 2)
    assert asked == [("start", "old"), ("start", "new"), ("start", "new"), ("start", "old")]
    (shown,) = against.tables({"commit": "abc", "figures": figures, "others_cores": 1.0})
    assert shown["rows"] == [["start ms", 2.5, 1.25, "0.688 [0.375, 1]"]]
    assert "1.00 cores busy" in shown["notes"][1]
    assert "again on a quiet machine" in shown["notes"][1]
