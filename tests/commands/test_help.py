"""Help on one screen, by section and in full; and what people type from habit."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.commands import COMMANDS
from lockstep.commands.shared.help import EVERYDAY
from lockstep.config import Config
from lockstep.config.fields import flag_names, flags_of
from lockstep.config.flags import ADVICE
from lockstep.config.recipes import RECIPES
from tests import inprocess
from tests.configs import flags_of_command

SECTIONS = ("run", "data", "samples", "model", "optim", "comm", "selection", "execution", "recovery")


def said(capsys: pytest.CaptureFixture[str], line: str, code: int = 0) -> str:
    out, err = inprocess.said(capsys, *line.split(), code=code)
    return err or out


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_everyday_help_is_one_screen(recipe: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = said(capsys, f"train {recipe} --help").splitlines()
    assert len(lines) <= 55
    flags = re.findall(r"^  (?:-\w, |    )(--[\w-]+)", "\n".join(lines), re.MULTILINE)
    assert flags == [name for names in EVERYDAY.values() for name in names]
    assert 18 <= len(flags) <= 24
    assert set(flags) <= set(flag_names(Config))
    batch = RECIPES[recipe]().batch_size
    assert any("--batch-size" in one and f"[{batch}]" in one + two for one, two in itertools.pairwise(lines))


@pytest.mark.parametrize("columns", [40, 100])
def test_nothing_breaks_inside_a_word(columns: int, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    texts = [said(capsys, "--help"), *(said(capsys, f"{name} --help all") for name in COMMANDS if name != "lint")]
    for line in "\n".join(texts).splitlines():
        assert len(line) <= min(columns, 100) or len(line.split()[-1]) > columns / 4, line
    whole = " ".join(said(capsys, "train --help all").split())
    for flag in flags_of(Config).values():
        assert flag.help in whole, flag.name


@pytest.mark.parametrize("columns", [40, 100])
def test_recipes_and_what_they_are_fit_too(columns: int, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    whole = said(capsys, "recipes")
    for name, make in RECIPES.items():
        about = (make.__doc__ or "").split()
        shown = said(capsys, f"show {name}").partition("\nlockstep train")[0]
        assert shown.replace("\n#", "").split()[1 : len(about) + 1] == about
        for line in (*whole.splitlines(), *shown.splitlines()):
            assert len(line) <= columns or len(line.split()[-1]) > columns / 4, line


def test_a_section_has_its_flags_and_all_have_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[str] = []
    for section in SECTIONS:
        text = said(capsys, f"train mnist --help {section}")
        assert f"\n{section}:\n" in text
        found += re.findall(r"^  (?:-\w, )?(--[\w\[\]-]+)", text.partition(f"\n{section}:\n")[2], re.MULTILINE)
    assert sorted(name.replace("[no-]", "") for name in found) == sorted(
        {flag.name for flag in flag_names(Config).values()}
    )
    assert all(f"{section}" in said(capsys, "train --help") for section in SECTIONS)
    assert "unknown section 'comm'" in said(capsys, "eval --help=comm", code=2)
    assert "no sections" in said(capsys, "runs --help=optim", code=2)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("train", "lint")])
def test_other_commands_explain_their_own_flags_and_give_an_example(command: str, capsys: Any) -> None:
    short, full = said(capsys, f"{command} --help"), said(capsys, f"{command} --help all")
    assert "--weight-decay" not in short
    assert len(short.splitlines()) < 70
    assert (f"lockstep {command}" in short.partition("examples:")[2]) == bool(COMMANDS[command].examples)
    if len(flags_of_command(command)) > 30:
        assert "--help all" in short
        assert len(full.splitlines()) > len(short.splitlines())


@pytest.mark.parametrize("flag", ADVICE)
def test_what_has_no_flag_here_is_answered_with_how_it_is_said(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, f"train {flag}", code=2) == f"lockstep: {flag}: {ADVICE[flag]}\n"
    named = set(re.findall(r"(?<![\w-])--[a-z-]+", ADVICE[flag]))
    assert named or "`lockstep" in ADVICE[flag] or "data" in ADVICE[flag]
    assert named <= set(flag_names(Config))


def test_what_is_no_recipe(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("flowers", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    (tmp_path / "mine.toml").touch()
    for name, answer in {
        "resnet18": "resnet18 is a network, not a recipe\n  As `lockstep train cifar10 --model resnet18`.",
        "flowers": "`lockstep train photos --data-dir flowers`",
        "run": "`lockstep train --config run/config.json --out run`",
        "mine.toml": "Give it as --config mine.toml.",
        "mnst": "Did you mean mnist",
    }.items():
        assert answer in said(capsys, f"train {name}", code=2)
