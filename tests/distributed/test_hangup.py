"""A run on a real terminal, which closes."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.journals import read

pytestmark = pytest.mark.slow
_S = 180.0  # far more than any part takes
# the leader of a session of its own whose terminal its standard streams are, as a shell makes it
_LEADER = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'lockstep', *sys.argv[1:]])"
)


@contextmanager
def on_a_terminal(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A run in a folder, and the other end of its terminal."""
    ours, theirs = os.openpty()
    words = ("train", "--threads", "1", "--fraction", "0.2", "--out", "run", *flags)
    process = subprocess.Popen(
        [sys.executable, "-c", _LEADER, *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def shown_until_an_evaluation(folder: Path, process: subprocess.Popen[bytes], terminal: int) -> str:
    """What it printed until its journal has an `eval` record; a terminal that nobody reads would hold it up."""
    shown, journal, deadline = b"", folder / "run/journal.jsonl", time.monotonic() + _S
    while not (journal.exists() and any(record["kind"] == "eval" for record in read(journal))):
        assert process.poll() is None, shown
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.05)[0]:
            shown += os.read(terminal, 65536)
    return shown.decode(errors="replace")


def test_a_run_goes_on_without_its_terminal(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path, "--nproc", "2", "--epochs", "12") as (process, terminal):
        shown = shown_until_an_evaluation(tmp_path, process, terminal)
        os.close(terminal)
        assert process.wait(_S) == 0, shown
    records = read(tmp_path / "run/journal.jsonl")
    assert (records[-1]["kind"], records[-1]["status"]) == ("end", "completed")
    assert any(record.get("fault") == "output" for record in records), "it says that nobody reads what it prints"
    assert "digits: digits_net on" in shown
