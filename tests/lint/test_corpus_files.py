"""The corpus itself: enough scripts, each with one fault that has a name and a line, and all of them Python."""

import difflib
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.lint.corpus.held_out import CORPUS, HELD_OUT, Expected, Script, expected, scripts
from tests.lint.corpus.score import score, statement

KEYWORDS = tomllib.loads((CORPUS / "keywords.toml").read_text(encoding="utf-8"))
RIGHT, WRONG = scripts("right"), scripts("wrong")


def test_there_are_enough_of_both() -> None:
    assert len(WRONG) >= 80
    assert len(RIGHT) >= 40
    assert len({script.family for script in WRONG}) >= 40, "not the same script over and over"


def test_right_scripts_expect_nothing() -> None:
    assert [script.path.name for script in RIGHT if script.fault] == []
    assert all(expected(file) is None for script in RIGHT for file in script.files)


@pytest.mark.parametrize("script", WRONG, ids=lambda script: script.path.stem)
def test_a_wrong_script_has_one_fault_on_a_line_that_exists(script: Script) -> None:
    fault = script.fault
    assert fault is not None
    assert fault.keyword in KEYWORDS
    assert script.path.stem.startswith(f"{script.family}__{fault.keyword.replace('-', '_')}")
    places = [(fault.file, fault.line), *fault.others]
    assert len(set(places)) == len(places)
    for file, number in places:
        assert file in script.files
        lines = file.read_text(encoding="utf-8").splitlines()
        assert 1 < number <= len(lines)
        assert lines[number - 1].strip()
        assert not lines[number - 1].lstrip().startswith("#")


def test_every_keyword_has_a_sentence_and_two_wrong_scripts_of_different_families() -> None:
    families = defaultdict(set)
    for script in WRONG:
        assert script.fault
        families[script.fault.keyword].add(script.family)
    assert {keyword: len(families[keyword]) for keyword in KEYWORDS if len(families[keyword]) < 2} == {}
    for keyword, table in KEYWORDS.items():
        assert set(table) <= {"group", "says", "also"}, keyword
        assert table["group"] in ("data", "maths", "process", "files"), keyword
        assert table["says"].endswith("."), keyword
        assert set(table.get("also", [])) <= set(KEYWORDS) - {keyword}, keyword


def test_a_wrong_script_is_its_family_s_right_one_but_for_a_few_lines() -> None:
    right = {script.family: script for script in RIGHT}
    for script in WRONG:
        changed = 0
        for before, after in zip(right[script.family].files, script.files, strict=True):
            old, new = (file.read_text(encoding="utf-8").splitlines()[1:] for file in (before, after))
            changed += sum(line[0] in "+-" for line in list(difflib.unified_diff(old, new, n=0))[2:])
        assert 1 <= changed <= 100, f"{script.path.name}: {changed}"


def test_whole_families_are_held_out() -> None:
    assert {script.family for script in RIGHT if script.held_out} == HELD_OUT
    assert len([script for script in WRONG if script.held_out]) >= 60
    assert all(script.held_out == (script.path.stem.split("__")[0] in HELD_OUT) for script in WRONG)


def test_all_of_it_compiles() -> None:
    for script in [*RIGHT, *WRONG]:
        for file in script.files:
            compile(file.read_text(encoding="utf-8"), str(file), "exec")


def test_nothing_is_unused_or_undefined() -> None:
    """Else a reader, or a rule, would trip over what isn't the fault."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "E4,E7,E9,F",
        "--ignore",
        "E731",
    ]
    ended = subprocess.run([*command, "right", "wrong"], cwd=CORPUS, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("first", ["", "# expect: No-Epoch line 3", "# expect: no-set-epoch", "# expect: none line 3"])
def test_a_first_line_that_says_nothing_is_refused(first: str, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(f"{first}\nprint()\n")
    with pytest.raises(AssertionError, match="first line"):
        expected(tmp_path / "some.py")


def test_a_first_line_may_name_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("# expect: no-set-epoch line 12 or 3 or other.py:40\n")
    assert expected(path) == Expected("no-set-epoch", path, 12, ((path, 3), (tmp_path / "other.py", 40)))


def test_the_score_of_a_linter_that_knows_everything_and_of_one_that_says_one_thing_everywhere() -> None:
    faults = {script.path: script.fault for script in WRONG if script.fault}
    codes = {f"X{number}": [keyword] for number, keyword in enumerate(KEYWORDS)}
    of_keyword = {keyword: code for code, (keyword,) in codes.items()}
    also = {keyword: table.get("also", []) for keyword, table in KEYWORDS.items()}

    def all_knowing(path: Path) -> list[tuple[str, Path, int]]:
        fault = faults.get(path)
        return [(of_keyword[fault.keyword], fault.file, fault.line)] if fault else []

    perfect = score(all_knowing, codes, also)
    assert (perfect.found, perfect.missed, perfect.false_alarms) == (len(WRONG), [], [])
    assert (perfect.wrong, perfect.right) == (len(WRONG), len(RIGHT))
    aside = score(all_knowing, codes, also, "held out")
    assert (aside.wrong, aside.right) == tuple(sum(one.held_out for one in group) for group in (WRONG, RIGHT))
    rest = score(all_knowing, codes, also, "open")
    assert (rest.wrong + aside.wrong, rest.right + aside.right) == (len(WRONG), len(RIGHT))

    def parrot(path: Path) -> list[tuple[str, Path, int]]:
        return [(of_keyword["pickle-load"], path, 2)]  # never on the right line

    same = score(parrot, codes, also)
    assert same.found == 0
    assert len(same.misplaced) == sum(fault.keyword == "pickle-load" for fault in faults.values())
    assert len(same.false_alarms) == len(RIGHT)
    assert len(same.others) + len(same.misplaced) == len(WRONG)


def test_a_report_counts_anywhere_on_the_fault_s_statement(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("# expect: none\nfor one in (\n    1,\n):\n    call(\n        one,\n    )\n    print()\n")
    assert statement(path, 3) == (2, 4), "a loop's head, not its body"
    assert statement(path, 6) == (5, 7)
    assert statement(path, 8) == (8, 8)
