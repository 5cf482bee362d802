"""The bar in a real terminal, and plain lines elsewhere."""

import io
import os
import pty
import re
import sys
import threading

import pytest
from rich.console import Console

from lockstep.watch import progress
from lockstep.watch.progress import ProgressBar
from tests.subprocesses import Command

DRAW = """
from lockstep.watch.progress import ProgressBar
bar = ProgressBar(20, 2, enabled={enabled}, done=4)
bar.write("digits: [bold]digits_net[/bold] on digits/train")
for step in (5, 10, 20):
    bar.update(step, 1 + step // 11, 1 / step, 0.1, 12345.6)
bar.close()
"""


def in_terminal(program: str) -> str:
    """What a program writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    chunks: list[bytes] = []

    def collect() -> None:
        while True:
            try:
                chunks.append(os.read(ours, 1 << 16))
            except OSError:  # the other end is closed: Linux's end of file for terminals
                return

    reader = threading.Thread(target=collect)
    reader.start()
    command = Command(
        sys.executable, "-c", program, env={"TERM": "xterm", "COLUMNS": "120", "LINES": "30"}, stdout=theirs
    )
    os.close(theirs)
    ended = command.end()
    reader.join()
    os.close(ours)
    assert ended.code == 0, ended.text
    return b"".join(chunks).decode()


def test_one_live_bar_in_a_terminal() -> None:
    screen = in_terminal(DRAW.format(enabled=True))
    assert "digits: [bold]digits_net[/bold] on digits/train" in screen  # a file name in brackets is no markup
    assert screen.count("\n") < 8  # redrawn in place
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "\n").strip().split("\n")[-1]
    for part in ("epoch 2/2", "step 20/20", "loss 0.0500", "lr 0.1", "12,346 images/s", "0:00:00"):
        assert part in last, screen


def test_other_ranks_draw_nothing() -> None:
    assert in_terminal(DRAW.format(enabled=False)) == ""


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda **options: Console(file=out, force_terminal=False, width=40, **options)
    )
    return out


def test_plain_lines_where_there_is_no_terminal(plain: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("lockstep.watch.progress.time.monotonic", lambda: float(next(clock)))
    bar = ProgressBar(100, 2, enabled=True)
    bar.write("a line that is longer than the forty columns of this console stays one line")
    for step in range(10, 60, 10):
        bar.update(step, 1, 0.5, 0.01, 1000.0)
    bar.close()
    lines = plain.getvalue().splitlines()
    assert lines[0].endswith("stays one line")
    assert 1 <= len(lines) - 1 < 5  # not one a step
    assert re.fullmatch(r"epoch 1/2  step \d0/100  loss 0\.5000  lr 0\.01  1,000 images/s  \d+ s left", lines[1])


def test_quick_runs_say_nothing_between(plain: io.StringIO) -> None:
    bar = ProgressBar(100, 2, enabled=True)
    for step in range(1, 101):
        bar.update(step, 1, 0.5, 0.01, 1000.0)
    bar.close()
    assert plain.getvalue() == ""
