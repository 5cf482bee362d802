"""What audit says of wrong scripts and of right ones: scripts/table.toml has it, and the pages show it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.commands.audit.faults import Finding
from tests.audit.recorded import SCRIPTS, Expected, Process, audited, row, starting, table
from tests.subprocesses import run_lockstep

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "audit.md").read_text(encoding="utf-8")
ROWS = table()


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with starting() as one:
        yield one


def held_to(expected: Expected, process: Process, nproc: tuple[int, ...]) -> list[Finding]:
    """Audit a script, and compare the codes with the table's."""
    records, found = audited(expected.path, process=process, nproc=nproc, nodes=expected.nodes)
    printed = "\n".join(text for record in records for text in record.printed)
    said = {each.code for each in found if not each.note}
    assert said == set(expected.says), f"{found}\n{printed[-3000:]}"
    assert {each.code for each in found if each.note} == set(expected.notes), found
    assert expected.says or all(record.ended == "done" for record in records), printed[-3000:]
    return found


def rows_of(page: str) -> list[str]:
    """The lines of the page's block of scripts."""
    (block,) = re.findall(
        r"^```\n(wrong/.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return block.splitlines()


def test_every_script_is_in_the_table_and_on_the_page() -> None:
    assert sorted(each.name for each in ROWS) == sorted(f"{p.parent.name}/{p.stem}.py" for p in SCRIPTS.glob("*/*.*"))
    named = {line.split()[0] for line in rows_of("audit.md") if not line.startswith(" ")}
    assert named == {each.name for each in ROWS}
    assert rows_of("audit.md") == rows_of("zh/audit.md")


@pytest.mark.parametrize("name", ["wrong/no_set_epoch.py", "right/accumulation.py"])
def test_a_wrong_and_a_right_script_on_two_processes(name: str, process: Process) -> None:
    (expected,) = (each for each in ROWS if each.name == name)
    held_to(expected, process, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("expected", ROWS, ids=lambda expected: expected.name)
def test_what_is_said_of_a_script_on_several_processes(expected: Expected, process: Process) -> None:
    if expected.needs:
        pytest.importorskip(expected.needs, reason=f"the script is written for {expected.needs}, which isn't installed")
    found = held_to(expected, process, (1, 4) if expected.exact or expected.nodes > 1 else (2,))
    told = " ".join(f"{each.at} {each.says}" for each in found)
    assert all(word in told for word in expected.words), told
    if expected.exact:
        at = rows_of("audit.md")
        for line in row(expected, found).splitlines():
            assert line in at, f"{line}\nis not on the page: python -m tests.audit.recorded {expected.path.stem}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "arguments", "codes"),
    [
        ("05-the-loss", ["--wrong"], {"LS203", "LS204"}),
        ("05-the-loss", [], set()),
        ("06-set-epoch", ["--wrong"], {"LS101"}),
        ("06-set-epoch", [], set()),
        ("12-checkpoint", ["--file", "run.pt", "--wrong"], {"LS404"}),
        ("12-checkpoint", ["--file", "run.pt"], set()),
    ],
)
def test_the_courses_wrong_ways_are_found(step: str, arguments: list[str], codes: set[str], process: Process) -> None:
    _, found = audited(DOCS.parent / "examples/course" / f"{step}.py", *arguments, process=process, nproc=(1, 2))
    assert {each.code for each in found} == codes, found


@pytest.mark.slow
def test_a_hang_is_told_as_on_the_page() -> None:
    (block,) = re.findall(r"^```console\n(\$ lockstep audit --nproc 2 .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    command, *lines = block.splitlines()
    ended = run_lockstep(*command.split()[2:], cwd=DOCS.parent, timeout=200)
    assert ended.code == 1, ended.text
    assert ended.out.splitlines()[1:] == lines[1:], ended.text
    assert ended.out.partition("; stalled in ")[0] == lines[0].partition("; stalled in ")[0]
