"""A command of lockstep in the test's own process."""

import pytest

from lockstep import cli


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[str, str]:
    """Its standard output and error; it has to end with this code."""
    capsys.readouterr()  # of another one before
    with pytest.raises(SystemExit) as end:
        cli.main([*map(str, words)])
    out, err = capsys.readouterr()
    assert (end.value.code or 0) == code, err or out
    return out, err
