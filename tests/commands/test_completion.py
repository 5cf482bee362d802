"""Completion, asked as a shell asks it."""

import shutil
import subprocess

import pytest

from lockstep import cli
from lockstep.commands.completion import script
from lockstep.config.flags import known_flags
from lockstep.config.recipes import RECIPES

COMMANDS = {name: usage for name, (usage, _, _) in cli.COMMANDS.items()}
TRY = """
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); COMPREPLY=(); _lockstep; echo "${{COMPREPLY[*]}}"
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_commands_recipes_flags_and_values() -> None:
    tries = {
        "lockstep wat": "watch",
        "lockstep train cifar10": "cifar10 cifar10-speed cifar100",
        "lockstep train mnist --lab": "--label-smoothing",
        "lockstep train --precision f": "fp32 fp16",
        "lockstep runs --sor": "--sort",
        "lockstep eval --wei": "--weights",
        "lockstep eval x": "",
        'lockstep train ""': " ".join(RECIPES),
        'lockstep ""': " ".join(COMMANDS),
    }
    program = script("bash", COMMANDS) + "".join(TRY.format(words=words) for words in tries)
    ended = subprocess.run(["bash", "--norc"], input=program, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert dict(zip(tries, ended.stdout.splitlines(), strict=True)) == tries


def test_every_flag_of_train_is_known_to_it() -> None:
    from lockstep.config import Config

    words = script("bash", COMMANDS).split()
    assert not {flag for flag in known_flags(Config) if flag not in words and f"'{flag}" not in "".join(words)}


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_takes_the_same_function() -> None:
    first = "autoload -U compinit && compinit -u -D\n"
    last = "whence -w _lockstep\n"
    program = first + script("zsh", COMMANDS) + last
    ended = subprocess.run(["zsh", "-f"], input=program, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "_lockstep: function\n"), ended.stderr


def test_a_shell_that_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["completion", "fish"])
    assert end.value.code == 2
    assert "got fish" in capsys.readouterr().err
