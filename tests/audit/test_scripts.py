"""What audit says of wrong scripts and of right ones: scripts/table.toml has it, and the pages show it."""

import re
from pathlib import Path

import pytest

from tests.audit.recorded import SCRIPTS, Expected, audited, row, table

DOCS = Path(__file__).parents[2] / "docs"
ROWS = table()


def held_to(expected: Expected, *arguments: str, nproc: tuple[int, ...]) -> None:
    records, found = audited(expected.path, *arguments, nproc=nproc)
    printed = "\n".join(text for record in records for text in record.printed)
    said = {each.code for each in found if not each.note}
    assert said == set(expected.says), f"{found}\n{printed[-3000:]}"
    assert {each.code for each in found if each.note} == set(expected.notes), found
    told = " ".join(f"{each.at} {each.says}" for each in found)
    assert all(word in told for word in expected.words), told
    lines = rows_of("audit.md")
    if set(nproc) == {1, 2, 4}:
        for each in row(expected, found).splitlines():
            assert each in lines, f"{each}\nis not on the page: python -m tests.audit.recorded"


def rows_of(page: str) -> list[str]:
    """The lines of the page's block of scripts."""
    (block,) = re.findall(
        r"^```\n(wrong/.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return block.splitlines()


def test_every_script_is_in_the_table_and_on_the_page() -> None:
    assert sorted(each.path for each in ROWS) == sorted(SCRIPTS.glob("*/*.py"))
    named = {line.split()[0] for line in rows_of("audit.md") if not line.startswith(" ")}
    assert named == {each.name for each in ROWS}
    assert rows_of("audit.md") == rows_of("zh/audit.md")


@pytest.mark.parametrize("name", ["wrong/no_set_epoch.py", "right/accumulation.py"])
def test_a_wrong_and_a_right_script_on_two_processes(name: str) -> None:
    (expected,) = (each for each in ROWS if each.name == name)
    held_to(expected, nproc=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("expected", ROWS, ids=lambda expected: expected.name)
def test_what_is_said_of_a_script_on_1_2_and_4_processes(expected: Expected) -> None:
    held_to(expected, nproc=(1, 2, 4))
