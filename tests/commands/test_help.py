"""Help on one screen, by section and in full; and what people type from habit."""

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.commands.shared.helping import EVERYDAY, joined
from lockstep.config import Config
from lockstep.config.flags import HABITS, known_flags, split_arguments
from lockstep.config.recipes import RECIPES
from lockstep.errors import SAID

SECTIONS = ("run", "data", "samples", "model", "optim", "link", "choose", "execution", "recovery")


def said(capsys: pytest.CaptureFixture[str], line: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    return err or out


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_everyday_help_is_one_screen(recipe: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = said(capsys, f"train {recipe} --help").splitlines()
    assert len(lines) <= 44
    assert max(map(len, lines)) <= 80
    flags = re.findall(r"^  (?:-\w, |    )(--[\w-]+)", "\n".join(lines), re.MULTILINE)
    assert flags == [name for lines in EVERYDAY.values() for name in lines]
    assert 18 <= len(flags) <= 24
    assert set(flags) <= set(known_flags(Config))
    batch = RECIPES[recipe]().batch_size
    assert any("--batch-size" in line and line.endswith(f"[{batch}]") for line in lines)


def test_a_section_has_its_flags_and_all_have_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[str] = []
    for section in SECTIONS:
        text = said(capsys, f"train mnist --help {section}")
        assert f"\n{section}:\n" in text
        found += re.findall(r"^  (?:-.*, )?(--[\w-]+)", text.partition(f"\n{section}:\n")[2], re.MULTILINE)
    names = {flag.names for flag in known_flags(Config).values()}
    assert len(found) == len(names)
    assert set(found) <= {name for flag in names for name in flag}
    assert all(f"{section}" in said(capsys, "train --help") for section in SECTIONS)
    assert "unknown section 'link'" in said(capsys, "eval --help link", code=2)
    assert "no sections" in said(capsys, "runs --help optim", code=2)


@pytest.mark.parametrize(
    "command", ["verify", "compare", "tune", "sweep", "lr-find", "forecast", "eval", "predict", "preview"]
)
def test_other_commands_explain_their_own_flags_first(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    short, full = said(capsys, f"{command} --help"), said(capsys, f"{command} --help all")
    assert "--help all" in short
    assert "--weight-decay" not in short
    assert "--master-addr" not in short
    assert len(short.splitlines()) < 70
    assert ("--master-addr" in full) or command in ("compare", "tune")
    assert len(full.splitlines()) > len(short.splitlines())


def test_a_word_after_help_that_is_no_section_stays_what_it_is() -> None:
    assert joined(["--help", "mnist"]) == ["--help", "mnist"]
    assert joined(["mnist", "-h", "optim"]) == ["mnist", "--help=optim"]
    assert joined(["--dataset", "all"]) == ["--dataset", "all"]


def test_what_is_typed_from_habit_works() -> None:
    typed = ["-b", "32", "-j", "1", "--wd=0.1", "--opt", "adamw", "--output_dir", "x"]
    expected = ["--batch-size", "32", "--workers", "1", "--weight-decay=0.1", "--optimizer", "adamw", "--out", "x"]
    assert split_arguments(typed, Config) == ([], expected)
    flags = known_flags(Config)
    for habit, name in HABITS.items():
        value = next(iter(flags[name].choices), "1")
        assert split_arguments([habit, value], Config)[1] in ([name, value], [f"{name}={value}"])


@pytest.mark.parametrize("flag", SAID)
def test_or_one_sentence_says_how_it_is_said_here(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, f"train {flag}", code=2) == f"lockstep: {flag}: {SAID[flag]}\n"


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
