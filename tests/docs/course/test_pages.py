"""The course's pages: what they show is what the programs are, in both languages, for every step."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

import consequences
from tests.docs.course.pages import DRAWN, changes, pages, rendered
from tests.docs.course.programs import PAGES, PROGRAMS, ROOT

_FIGURE = re.compile(r"\d+(?:\.\d+)?")


def _ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_step_has_a_program_and_a_page_of_its_name() -> None:
    names = [path.stem for path in sorted(PROGRAMS.glob("[0-9]*.py"))]
    assert [name[:2] for name in names] == list(consequences.STEPS) == [f"{i + 1:02}" for i in range(len(names))]
    for folder in PAGES:
        assert [page.stem for page in sorted(folder.glob("[0-9]*.md"))] == names


@pytest.mark.parametrize("page", pages(), ids=_ids)
def test_programs_and_diffs_are_those_of_the_files(page: Path) -> None:
    assert rendered(page, DRAWN) == page.read_text(encoding="utf-8"), (
        "run: PYTHONPATH=src:examples/course python -m tests.docs.course.pages"
    )
    if page.stem != "index":
        kinds = [words.split()[0] for words in re.findall(r"<!-- begin (.*) -->", page.read_text(encoding="utf-8"))]
        assert "program" in kinds or "diff" in kinds
        assert {"table", "run"} <= set(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=_ids)
def test_figures_and_outputs_are_those_of_the_programs(page: Path) -> None:
    """All steps, wrong and right, on 1, 2 and 4 processes; each is run once for all pages."""
    shown, found = (text.splitlines() for text in (page.read_text(encoding="utf-8"), rendered(page)))
    assert len(shown) == len(found)
    for ours, theirs in zip(shown, found, strict=True):
        rounded = any(step in page.stem or f"({step}" in ours for step in ("08-amp", "14-the-same"))
        assert nearly(ours, theirs) if rounded else ours == theirs


def nearly(one: str, other: str) -> bool:
    """Equal but for the rounding of float16 and float32, which other kernels do otherwise."""
    texts, figures = zip(*((_FIGURE.sub("#", text), _FIGURE.findall(text)) for text in (one, other)), strict=True)
    return texts[0] == texts[1] and [float(value) for value in figures[0]] == pytest.approx(
        [float(value) for value in figures[1]], rel=0.03, abs=0.02
    )


def test_what_is_not_nearly_equal_would_be_seen() -> None:
    line = "| right | test loss | 0.13 | 0.14 |"
    assert nearly(line, line.replace("0.13", "0.14"))
    assert not nearly(line, line.replace("0.13", "0.23"))
    assert not nearly(line, line.replace("test", "training"))


def test_programs_stay_short() -> None:
    for path in PROGRAMS.glob("[0-9]*.py"):
        assert len(path.read_text().splitlines()) < 170, path.name


def test_a_diff_leads_from_one_program_to_the_next() -> None:
    """What has a minus stands in the old one alone, or more often; with plus and blank it is the new one's."""
    texts = [path.read_text().splitlines() for path in sorted(PROGRAMS.glob("[0-9]*.py"))]
    for old, new in pairwise(texts):
        lines = changes(old, new)
        gone = Counter(line[1:] for line in lines if line.startswith("-"))
        come = Counter(line[1:] for line in lines if line.startswith("+"))
        assert gone <= Counter(old)
        assert Counter(old) - gone + come == Counter(new)
