"""Nobody changes the command line or a public signature without showing it: both are written down."""

import difflib
import re
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.config.fields import flag_names, flags_of
from tests.config import frozen


@pytest.mark.parametrize("file", frozen.FILES)
def test_what_users_rely_on_is_as_written_down(file: str) -> None:
    there = Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines()
    changed = list(difflib.unified_diff(there, frozen.FILES[file]().splitlines(), "written down", "found", n=0))
    assert not changed, "\n".join([f"{file}: if this is meant, run python -m tests.config.frozen", *changed])


def test_the_help_offers_each_flag_once_with_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    for command, default in frozen.parsers().items():
        with pytest.raises(SystemExit):
            cli.main([*command.split(), "--help", "all"])
        offered = re.findall(r"^  (?:-\w, )?(--(?:\[no-\])?[a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)
        named = [name.replace("[no-]", "") for name in offered]
        assert sorted(named) == sorted({flag.name for flag in flag_names(default).values()}), command
        assert [flag.name for flag in flags_of(default).values() if flag.arg.flag and not flag.help] == [], command
