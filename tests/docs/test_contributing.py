"""CONTRIBUTING.md is true: its files exist, and its examples, applied to a copy of the tree, do what it says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.diffs import edited, places
from tests.subprocesses import run_lockstep

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
NEEDED = ("src", "tests", "docs", "benchmarks", "README.md", "pyproject.toml")  # of the copy in which an example runs
MOST_FILES = 3


@dataclass(frozen=True)
class Example:
    """How to add one thing: (file, lines before, lines after) for each place, and commands that then work."""

    edits: tuple[tuple[str, str, str], ...]
    commands: tuple[str, ...]

    @property
    def files(self) -> set[str]:
        return {file for file, _, _ in self.edits}

    def apply(self, root: Path) -> None:
        for place in self.edits:
            path = root / place[0]
            path.write_text(edited(path.read_text(), place))


def example(section: str) -> Example:
    """The one that a section gives: a block of edits, then a block of commands."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (edits, commands) = ([text for kind, text in blocks if kind == wanted] for wanted in ("diff", ""))
    assert len(edits) == len(commands) == 1, section
    return Example(tuple(places(edits[0])), tuple(commands[0].splitlines()))


EXAMPLES = {
    section.partition("\n")[0]: example(section)
    for section in re.split(r"^### ", PAGE.partition("\n## Add ...\n")[2].partition("\n## ")[0], flags=re.MULTILINE)[1:]
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the examples change and run."""
    left = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in NEEDED:
        source = ROOT / name
        shutil.copytree(source, tmp_path / name, ignore=left) if source.is_dir() else shutil.copy(source, tmp_path)
    return tmp_path


def run(command: str, tree: Path) -> subprocess.CompletedProcess[str]:
    """A line of the page, in a shell, with the copy's own package."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    line = re.sub(r"^lockstep ", f"{sys.executable} -m lockstep ", re.sub(r"^pytest ", "pytest -q ", command))
    shell = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(shell, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)


def test_it_says_how_to_add_what_people_want_to_add() -> None:
    wanted = {"an optimizer", "a recipe", "a flag", "a metric", "a launcher", "a check of the doctor"}
    assert set(EXAMPLES) == wanted


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_names_few_files_and_lines_that_are_there(name: str, tree: Path) -> None:
    pages = {file.replace("docs/zh/", "docs/") for file in EXAMPLES[name].files}  # a page is one, in both languages
    assert 1 <= len(pages) <= MOST_FILES
    EXAMPLES[name].apply(tree)
    code = [file for file in EXAMPLES[name].files if file.endswith(".py")]
    ended = run(f"ruff check --no-cache {' '.join(code)}", tree)  # a name that is gone, a line that is too long
    assert ended.returncode == 0, ended.stdout


def test_an_example_that_no_longer_fits_would_be_seen(tree: Path) -> None:
    stale = example("x\n```diff\n+++ README.md\n no such line\n+new\n```\n\n```\ntrue\n```\n")
    with pytest.raises(AssertionError, match=r"README\.md does not have this once"):
        stale.apply(tree)


def fails(command: str, tree: Path) -> bool:
    """Whether a line of the page does so before the change: those of lockstep by the package that is imported here."""
    if command.startswith("pytest "):
        return run(command, tree).returncode != 0
    words, _, wanted = command.partition(" | grep ")
    ended = run_lockstep(*words.split()[1:], cwd=tree)
    return ended.code != 0 or wanted.strip('"') not in ended.out


def chosen(command: str) -> dict[str, str]:
    """By file the tests that a `pytest` line chooses, as -k has it."""
    words = shlex.split(command)[1:]
    which = words[words.index("-k") + 1] if "-k" in words else "test"
    return {word: f"({Path(word).stem} and ({which}))" for word in words if word.endswith(".py")}


@pytest.mark.parametrize("names", [["a recipe"], pytest.param([*EXAMPLES], marks=pytest.mark.slow(30))])
def test_their_commands_fail_before_and_pass_after(names: list[str], tree: Path) -> None:
    """Several in one copy; what their `pytest` lines choose runs at once, since each start takes seconds."""
    examples = [EXAMPLES[name] for name in names]
    for each in examples:
        assert fails(each.commands[0], tree), each.commands[0]
    for each in examples:
        each.apply(tree)
    commands = [command for each in examples for command in each.commands]
    tests = [(file, which) for line in commands if line.startswith("pytest ") for file, which in chosen(line).items()]
    files, which = " ".join(dict(tests)), " or ".join(which for _, which in tests)
    for command in [line for line in commands if not line.startswith("pytest ")] + [f"pytest -rA {files} -k '{which}'"]:
        ended = run(command, tree)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    assert [file for file, _ in tests if f"PASSED {file}::" not in ended.stdout] == []


def test_every_file_that_it_names_exists() -> None:
    named = set(re.findall(r"\]\(([^)#\s]+)[^)]*\)", PAGE)) | set(
        re.findall(r"`((?:src|tests|docs|\.ci)/[^`*\s]+)`", PAGE)
    )
    named |= set(re.findall(r"\btests/[\w/.]+", PAGE))
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_room_has_its_line() -> None:
    rooms = {path.name for path in (ROOT / "src/lockstep").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)) == rooms
