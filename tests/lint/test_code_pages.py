"""A page for each code in both languages: its examples are linted, and what it has from the code is written anew."""

import re
from pathlib import Path

import pytest
from docs.from_code import lint as pages

from lockstep.commands.lint.check import check
from lockstep.commands.lint.fixes import fix
from lockstep.commands.lint.rule import RULES

CODES = sorted({*RULES, *(path.stem for path in (pages.DOCS / "lint").glob("LS*.md"))})
WRITE = "run `python -m docs.from_code.lint`, which writes what a page has from the code"
FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")


def codes_in(program: str) -> set[str]:
    return {each.code for each in pages.found_in(program)}


@pytest.mark.parametrize("code", CODES)
def test_a_code_has_a_page_whose_examples_are_wrong_and_right(code: str) -> None:
    assert code in RULES, f"there is no rule {code}: remove its page in both languages"
    for chinese in (False, True):
        assert pages.page_of(code, chinese).exists(), f"{code} has no page in {'Chinese' if chinese else 'English'}"
    page = pages.read(code, chinese=False)
    assert page.text
    assert page.harmless
    assert codes_in(page.wrong) == {code}, "the wrong example has this fault and no other"
    assert codes_in(page.right) == set(), "the right example has none"
    lines = page.wrong.splitlines()
    for finding in pages.found_in(page.wrong):
        lines[finding.line - 1] = pages.silenced(page.wrong, finding)
    assert codes_in("\n".join(lines)) == set(), "the line that is shown silences it"


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("chinese", [False, True], ids=["en", "zh"])
def test_a_page_is_as_it_would_be_written(code: str, chinese: bool) -> None:
    assert pages.page_of(code, chinese).read_text(encoding="utf-8") == pages.whole(code, chinese), WRITE


@pytest.mark.parametrize("chinese", [False, True], ids=["en", "zh"])
def test_the_index_lists_all(chinese: bool) -> None:
    text = pages.page_of("index", chinese).read_text(encoding="utf-8")
    assert text == pages.whole_index(chinese), WRITE
    assert re.findall(r"^- \[(LS\d+)\]", text, re.MULTILINE) == sorted(RULES)


def test_what_fix_writes_is_what_is_shown(tmp_path: Path) -> None:
    path, shown = tmp_path / "train.py", 0
    for code in sorted(RULES):
        wrong = pages.read(code, chinese=False).wrong
        path.write_text(wrong)
        left = fix(check([path], pages.EVERY)[0])
        after = path.read_text()
        assert pages.fixed(wrong, pages.found_in(wrong)) == (after if after != wrong else "")
        assert after == wrong or (left == [] and codes_in(after) == set()), f"{code}: --fix leaves something"
        assert (f"```python\n{after}```" in pages.page_of(code, False).read_text()) or after == wrong
        shown += after != wrong
    assert shown > 5


@pytest.mark.parametrize("code", CODES)
def test_figures_are_those_of_the_pages_that_are_linked(code: str) -> None:
    """A measured number stands on the page that measured it."""
    text = pages.read(code, chinese=False).text
    linked = {pages.page_of(code, False).parent / target for target in re.findall(r"\]\(([^)#\s]+\.md)", text)}
    known = set(FIGURE.findall("\n".join(page.read_text(encoding="utf-8") for page in linked)))
    computed = {"LS111": {"0.42", "2.82", "1.80", "8.73"}}.get(code, set())  # MNIST's mean 0.1307 and spread 0.3081
    figures = set(FIGURE.findall(re.sub(r"torch \d\.\d+|since \d\.\d", "", text)))
    assert figures - known == computed
