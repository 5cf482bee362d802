"""The pages on accuracy, batch size and measuring: what they show is what the programs in examples/why print."""

import re
import sys
from pathlib import Path

import pytest

import causes
from tests.subprocesses import Command

ROOT = Path(__file__).parents[3]
WHY = "why-accuracy-differs"


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def shown(page: str, program: str) -> list[str]:
    """The lines that a page says a program prints."""
    (block,) = [block for block in blocks(f"{page}.md", "console") if block.startswith(f"$ python {program}\n")]
    assert block in blocks(f"zh/{page}.md", "console")
    return block.splitlines()[1:]


def printed(program: str, *flags: str, folder: Path) -> list[str]:
    ended = Command(sys.executable, str(ROOT / program), *flags, cwd=folder, warm=True).end(timeout=500)
    assert ended.code == 0, ended.text
    return ended.out.splitlines()


def name_of(row: str) -> str:
    """The cause of a row."""
    return re.fullmatch(r"[-+±\d. ]+  (.*)", row)[1]


def figures_of(row: str) -> list[float]:
    """Size, mean, half of the interval, factor of the loss, steps."""
    return [float(word) for word in row.removesuffix(name_of(row)).replace("±", " ").split()]


def test_the_page_has_every_cause_the_largest_first() -> None:
    rows = shown(WHY, "examples/why/causes.py")[3:]
    assert sorted(map(name_of, rows)) == sorted(cause.name for cause in causes.CAUSES)
    sizes = [float(row.split()[0]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_the_summary_of_differences() -> None:
    size, mean, half = causes.summary([1.0, 3.0])
    assert (size, mean) == (5**0.5, 2.0)
    assert half == pytest.approx(12.71)  # Student's with one degree of freedom, and a standard error of 1


@pytest.mark.slow
def test_causes_have_the_size_that_the_page_gives(tmp_path: Path) -> None:
    page = {name_of(row): figures_of(row) for row in shown(WHY, "examples/why/causes.py")[3:]}
    now = printed("examples/why/causes.py", "--only", "meant per process", folder=tmp_path)[3:]
    assert len(now) == 3
    for row in now:
        assert figures_of(row) == pytest.approx(page[name_of(row)], abs=0.3)  # another machine rounds otherwise


def test_the_pages_on_batch_size_and_measuring_show_these_programs() -> None:
    assert len(shown("batch-size", "examples/why/batch_size.py")) == 13
    assert len(shown("measuring", "examples/why/false_speedups.py")) == 4
    batch = shown("batch-size", "examples/why/batch_size.py")
    for top in ("96.12", "94.25", "91.28"):  # which the page on measuring quotes
        assert any(line.split()[2] == top for line in batch[2:8])
        assert top in (ROOT / "docs/measuring.md").read_text(encoding="utf-8")


def test_drift_is_as_the_page_says(tmp_path: Path) -> None:
    assert printed("examples/why/drift.py", folder=tmp_path) == shown("measuring", "examples/why/drift.py")


@pytest.mark.slow
def test_batch_sizes_do_what_the_page_gives(tmp_path: Path) -> None:
    page = shown("batch-size", "examples/why/batch_size.py")
    now = printed("examples/why/batch_size.py", folder=tmp_path)
    assert (now[:2], now[8]) == (page[:2], page[8])
    for ours, theirs in zip(now[2:8], page[2:8], strict=True):
        assert [float(n) for n in ours.split()] == pytest.approx([float(n) for n in theirs.split()], abs=0.5)
    scales = [[float(line.split()[0]) for line in lines[9:]] for lines in (now, page)]
    assert scales[0] == pytest.approx(scales[1], rel=0.1, abs=1)


@pytest.mark.slow
def test_false_speedups_are_printed_as_on_the_page(tmp_path: Path) -> None:
    """The seconds are those of the machine, and not compared."""
    now, page = (
        printed("examples/why/false_speedups.py", folder=tmp_path),
        shown("measuring", "examples/why/false_speedups.py"),
    )
    assert [line[:32] for line in now] == [line[:32] for line in page]
    assert all(re.search(r"ms   x \d+\.\d\d$", line) for line in now)
