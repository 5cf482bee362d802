"""Every command line that a page shows is one: its flags and values are taken by the command that it names.

Blocks are the same in both languages (tests/docs/test_chinese.py), so only the English ones are tried. No training.
"""

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.commands import COMMANDS
from lockstep.commands.recipes import show
from lockstep.commands.shared import arguments
from lockstep.config.recipes import digits
from lockstep.errors import UserError
from lockstep.training import run_folder
from tests.docs.test_chinese import sections

ROOT = Path(__file__).parents[2]
_STARTED = re.compile(r"(?:.*? )??lockstep ([a-z-]+)(?: (.*))?")


class Taken(Exception):
    """The command line was read to its end."""


def commands(page: Path) -> Iterator[str]:
    """The command lines of a page's blocks, without the remarks on their right."""
    for section in sections(page.read_text(encoding="utf-8")):
        for fence, *lines in section.blocks:
            if fence in ("```", "```bash", "```console"):
                for line in lines:
                    if fence == "```console" and not line.startswith("$ "):
                        continue  # what it prints
                    words = re.split(r"\s{2,}|\s#", line.removeprefix("$ "))[0]
                    if re.match(r"lockstep [a-z]|(torchrun|mpirun|srun) .*lockstep [a-z]", words):
                        yield words


def all_commands() -> list[str]:
    pages = [*ROOT.glob("README*.md"), ROOT / "docs/zh/README.md", *(ROOT / "docs").rglob("*.md")]
    found = {line for page in pages if page.exists() for line in commands(page)}
    return sorted(line for line in found if not line.startswith("lockstep lint"))  # a program of its own


@pytest.fixture
def read_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands read their arguments, and no more; the files that pages name are there."""

    def taken(read: Any) -> Any:
        def wrapped(*args: Any, **how: Any) -> None:
            read(*args, **how)
            raise Taken

        return wrapped

    assert show(["digits", "--toml"]) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    for command in COMMANDS.values():
        importlib.import_module(f"lockstep.commands.{command.function.rpartition('.')[0]}")
    for name, module in list(sys.modules.items()):
        if name.startswith("lockstep.commands") and name != show.__module__:
            for function in ("planned", "parse"):
                if module is not arguments and getattr(module, function, None) is getattr(arguments, function):
                    monkeypatch.setattr(module, function, taken(getattr(arguments, function)))
    monkeypatch.setattr(run_folder, "read_config", lambda *_: digits())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/recipes.py").write_text("from lockstep.config.recipes import digits as ours")


@pytest.mark.slow
@pytest.mark.usefixtures("read_alone")
@pytest.mark.parametrize("line", all_commands(), ids=str)
def test_the_command_line_is_taken(line: str, tmp_path: Path) -> None:
    line = line.split(" > ")[0].split(" | ")[0]
    found = _STARTED.fullmatch(line)
    assert found
    command, rest = found.groups()
    words = shlex.split(rest or "")
    for word in words:  # runs that the page has made before
        if word.startswith("runs/"):
            run = tmp_path / (word if not word.endswith(".json") else str(Path(word).parent))
            run.mkdir(parents=True, exist_ok=True)
            (run / "config.json").write_text('{"recipe": "digits"}')
    run_command = COMMANDS[command].run
    if command in ("recipes", "show"):
        assert run_command(words) == 0
    else:
        with pytest.raises(Taken):
            run_command(words)


@pytest.mark.usefixtures("read_alone")
@pytest.mark.parametrize("words", [["--nprocs", "2"], ["--batch-size", "many"], ["no-such-recipe"]])
def test_what_is_wrong_would_be_seen(words: list[str]) -> None:
    with pytest.raises((UserError, SystemExit)):
        COMMANDS["train"].run(words)


def test_commands_are_found_beside_their_remarks() -> None:
    found = all_commands()
    assert "lockstep train mnist --nproc 2" in found
    assert len(found) > 80
