"""The concept pages: code on them stands in the programs, and what these print stands on them, in both languages."""

import re
import sys
from pathlib import Path

import pytest

from tests.subprocesses import Command

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/concepts"
PAGES = sorted(path.name for path in (ROOT / "docs/concepts").glob("*.md"))
TIMED: set[str] = set()  # programs that print seconds: their numbers are not compared
SLOW: set[str] = set()  # programs that take more than a few seconds


def english(name: str) -> str:
    return (ROOT / "docs/concepts" / name).read_text(encoding="utf-8")


def chinese(name: str) -> str:
    return (ROOT / "docs/zh/concepts" / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def formulas(text: str) -> list[str]:
    return re.findall(r"^    \S.*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)


def headings(text: str) -> list[str]:
    return re.findall(r"^(#+) ", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)


def shown() -> dict[str, str]:
    """Program -> what the pages say it prints."""
    found = {}
    for name in PAGES:
        for block in blocks(english(name), "console"):
            command, _, printed = block.partition("\n")
            match = re.fullmatch(r"\$ python examples/concepts/(\w+)\.py", command)
            assert match, command
            found[match[1]] = printed
    return found


def test_each_page_exists_in_both_languages() -> None:
    assert sorted(path.name for path in (ROOT / "docs/zh/concepts").glob("*.md")) == PAGES
    for name in PAGES:
        for text, folder in ((english(name), "docs/concepts"), (chinese(name), "docs/zh/concepts")):
            assert name == "index.md" or re.search(rf"\]\([./zh]*concepts/{name}\)", text), f"{folder}/{name}"
            assert name == "index.md" or "![" in text
    index = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\)", english("index.md"), re.MULTILINE)
    assert sorted([*index, "index.md"]) == PAGES
    assert index == re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\)", chinese("index.md"), re.MULTILINE)
    for text in (english("index.md"), chinese("index.md")):
        assert [f"{line}.md" for line in text.partition(":hidden:\n\n")[2].partition("```")[0].split()] == index


@pytest.mark.parametrize("name", PAGES)
def test_both_languages_show_the_same_code_numbers_and_formulas(name: str) -> None:
    for language in ("python", "console"):
        assert blocks(english(name), language) == blocks(chinese(name), language)
    assert formulas(english(name)) == formulas(chinese(name))
    assert headings(english(name)) == headings(chinese(name))


@pytest.mark.parametrize("name", PAGES)
def test_programs_on_a_page_stand_in_their_files(name: str) -> None:
    text = english(name)
    files = [EXAMPLES / file for file in re.findall(r"examples/concepts/(\w+\.py)", text)]
    for block in blocks(text, "python"):
        assert any(block in file.read_text(encoding="utf-8") for file in files), block


def test_every_program_has_its_output_on_a_page() -> None:
    assert sorted(shown()) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


def _param(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.mark.parametrize("name", [_param(name) for name in sorted(shown())])
def test_a_program_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    ended = Command(sys.executable, str(EXAMPLES / f"{name}.py"), cwd=tmp_path, warm=True).end(timeout=120)
    assert ended.code == 0, ended.text
    printed = shown()[name]
    if name in TIMED:
        assert re.sub(r"[\d.]+", "#", ended.out) == re.sub(r"[\d.]+", "#", printed)
    else:
        assert ended.out == printed
    assert not ended.orphans
