"""Nobody changes the command line or a public signature without showing it: both are written down."""

import difflib
import re
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.config.flags import hidden_fields, known_flags
from tests.config import frozen


@pytest.mark.parametrize("file", frozen.FILES)
def test_what_users_rely_on_is_as_written_down(file: str) -> None:
    there = Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines()
    changed = list(difflib.unified_diff(there, frozen.FILES[file]().splitlines(), "written down", "found", n=0))
    assert not changed, "\n".join([f"{file}: if this is meant, run python -m tests.config.frozen", *changed])


def test_the_help_offers_the_flags_that_are_written_down_and_no_hidden_one(capsys: pytest.CaptureFixture[str]) -> None:
    for command, (cls, _) in frozen.parsers().items():
        with pytest.raises(SystemExit):
            cli.main([*command.split(), "--help", "all"])
        heads = re.findall(r"^\W{0,2} (--[a-z].*?)(?:  |│|$)", capsys.readouterr().out, re.MULTILINE)
        offered = sorted(re.findall(r"--[a-z][\w-]*", " ".join(heads)))
        assert offered == sorted(known_flags(cls)), command
        hidden = {f"--{name.replace('_', '-')}" for name in hidden_fields(cls)}
        own = {f"--{name.replace('_', '-')}" for name in vars(cls).get("__dataclass_fields__", ())}
        assert not hidden.intersection(offered) - own, command
