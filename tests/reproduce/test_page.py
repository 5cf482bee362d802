"""docs/reproduce.md: its tables are tables of the report, and what they say of their numbers is so."""

import re
from pathlib import Path

import pytest

from lockstep.commands.reproduce import recipe, report
from tests.reproduce.shapes import REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "reproduce.md"
ROW = re.compile(r" +\d+ +([\d.]+) +([\d.]+) +([\d.]+) +(\S+)$", re.MULTILINE)


def test_the_differences_are_those_of_the_losses() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 23
    for *losses, said in rows:
        script, *ours = map(float, losses)
        digits = len(losses[0].partition(".")[2])
        found = max(abs(each - script) for each in ours) / script
        assert float(said) == pytest.approx(found, rel=0.06, abs=1.1 * 10**-digits / script), losses


def test_the_sentences_are_those_of_the_report() -> None:
    sources = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (recipe, report))
    text = re.sub(r'"\n\s+f?"', "", sources)
    block = PAGE.read_text(encoding="utf-8").split("\nfirst weights")[1].split("```")[0]
    lines = [line.strip() for line in block.splitlines()[1:] if line.strip()]
    assert len(lines) == 12
    for line in lines:
        head = re.split(r" [\d.]+e-|main-lockstep| all epochs|over \d", line)[0]  # without what differs between runs
        assert head in text


def test_what_is_refused_is_on_both_pages() -> None:
    for page in (PAGE, PAGE.parent / "zh" / PAGE.name):
        text = page.read_text(encoding="utf-8")
        for _, why in REFUSED.values():
            assert why.replace("script.py", "train.py") in text
