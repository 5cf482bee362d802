"""The console blocks of two pages, run in their order and compared but for what changes from run to run."""

import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.subprocesses import lockstep, run_lockstep

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "watching.md"


def steps(page: Path) -> list[tuple[str, list[str]]]:
    """(command, its output) of each line that begins with `$ `."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def shape(line: str) -> str:
    """Numbers, digests, and how wide columns are, change with the machine and the minute; words don't."""
    line = re.sub(r"\b[0-9a-f]{12}\b", "DIGEST", line)
    line = re.sub(r"[\d,.:-]*\d", "#", line)
    return " ".join(re.sub(r"\b(s|min)\b(?!\S)", "s", line).split())


def test_both_languages_show_the_same_commands() -> None:
    assert steps(PAGE) == steps(DOCS / "zh/watching.md")
    assert [command.split()[1] for command, _ in steps(PAGE)] == ["train", "train", "runs", "watch", "diff"]


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    for command, expected in steps(PAGE):
        words = shlex.split(command)
        assert words[0] == "lockstep"
        ended = run_lockstep(*words[1:], cwd=tmp_path, env={"COLUMNS": "80"}, timeout=300)
        assert ended.code == (1 if words[1] == "diff" else 0), ended.text
        lines = [shape(line) for line in ended.out.splitlines()]
        if words[1] == "runs":  # of which columns fit the widths of the numbers decide
            lines, expected = lines[:1] + lines[1:-1], expected[:-1]
            assert [line.split()[:8] for line in lines] == [shape(line).split()[:8] for line in expected]
            continue
        lines = [line for line in lines if not re.match(r"epoch #/#\s+#%", line)]  # of a slow machine
        shown = [shape(line) for line in expected]
        if words[1] == "diff":  # two runs may have taken the same tenth of a second: then it is no difference
            lines, shown = ([line for line in them if line != "seconds # #"] for them in (lines, shown))
        assert lines == shown, command


@pytest.mark.slow
def test_a_run_is_resized_as_its_page_shows(tmp_path: Path) -> None:
    (train, printed), *resizes = steps(DOCS / "elastic.md")
    assert [command.split()[1] for command, _ in resizes] == ["resize"] * 4
    assert not printed
    run = lockstep(*shlex.split(train)[1:], cwd=tmp_path)
    run.until((tmp_path / "runs/mine/run.lock").exists)
    for command, expected in resizes:
        ended = run_lockstep(*shlex.split(command)[1:], cwd=tmp_path, timeout=120)
        lines = [shape(line) for line in (ended.out + ended.err).splitlines()]
        assert lines[:1] == [shape(line) for line in expected], ended.text
    run.signal(signal.SIGTERM)
    assert run.end(120).code == 143
