"""The console blocks of three pages, run in their order and compared but for what changes from run to run."""

import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.subprocesses import lockstep, run_lockstep

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = {
    "quickstart.md": ["train", "train", "diff", "runs", "eval"],
    "watching.md": ["train", "train", "runs", "watch", "diff"],
    "elastic.md": ["train", "resize", "resize", "resize", "resize"],
}


def sessions(page: Path) -> list[tuple[str, list[str]]]:
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
    return " ".join(re.sub(r"\b(s|min|h)\b(?!\S)", "s", line).split())


def as_shown(shown: list[str], printed: list[str]) -> bool:
    """Whether the lines were printed in their order, with any others where the page has three dots."""
    parts = [re.escape(shape(line)) if line != "..." else r"[^\0]*?" for line in shown]
    text = "\n".join(shape(line) for line in printed if not re.search(r"images/s .* left", line))
    return re.fullmatch("\n?".join(parts) + "\n?", text) is not None


@pytest.mark.parametrize("page", COMMANDS)
def test_both_languages_show_the_same(page: str) -> None:
    found = sessions(DOCS / page)
    assert found == sessions(DOCS / "zh" / page)
    assert [command.split()[:2] for command, _ in found] == [["lockstep", name] for name in COMMANDS[page]]


def test_what_is_not_printed_would_be_seen() -> None:
    assert as_shown(["a 1", "...", "b"], ["a 2.5", "x", "y", "b"])
    assert as_shown(["a 1", "..."], ["a 2.5", "x"])
    assert not as_shown(["a 1", "...", "b"], ["a 2.5", "x"])
    assert not as_shown(["a 1", "b"], ["a 1", "x", "b"])


@pytest.mark.slow
def test_the_quick_start_prints_what_it_shows(tmp_path: Path) -> None:
    for command, shown in sessions(DOCS / "quickstart.md"):
        words = shlex.split(command)
        ended = run_lockstep(*words[1:], cwd=tmp_path, timeout=300)
        assert ended.code == 0, ended.text
        if "train" in words:
            assert float(re.findall(r"test accuracy ([\d.]+)%", ended.out)[0]) > 97
        assert as_shown(shown, ended.out.splitlines()), ended.text


@pytest.mark.slow
def test_the_page_on_watching_shows_what_its_commands_print(tmp_path: Path) -> None:
    for command, expected in sessions(DOCS / "watching.md"):
        words = shlex.split(command)
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
    (train, printed), *resizes = sessions(DOCS / "elastic.md")
    assert not printed
    run = lockstep(*shlex.split(train)[1:], cwd=tmp_path)
    run.until((tmp_path / "runs/mine/run.lock").exists)
    for command, expected in resizes:
        ended = run_lockstep(*shlex.split(command)[1:], cwd=tmp_path, timeout=120)
        lines = [shape(line) for line in (ended.out + ended.err).splitlines()]
        assert lines[:1] == [shape(line) for line in expected], ended.text
    run.signal(signal.SIGTERM)
    assert run.end(120).code == 143
