"""The bar in a real terminal, and plain lines elsewhere."""

import io
import os
import pty
import re
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.monitoring import progress
from lockstep.monitoring.progress import ProgressBar, clock, compose, duration
from tests.subprocesses import Command

DRAW = """
from lockstep.monitoring.progress import ProgressBar
bar = ProgressBar(20, 2, enabled=True, done=4)
bar.write("digits: [bold]digits_net[/bold] on digits/train")
bar.doing("compiling: step")
for step in (5, 10, 20):
    bar.update(step, 1 + step // 11, 1 / step, 0.1, 12345.6, 0.031)
bar.close()
"""
STARTING = """
from lockstep.distributed.output import status, unbreakable_output
with unbreakable_output():
    status("starting: loading " + "a set with a long name " * 6)
    status("starting: building a model")
    print("a line")
    status("starting again")
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
    screen = in_terminal(DRAW)
    assert "digits: [bold]digits_net[/bold] on digits/train" in screen  # a file name in brackets is no markup
    assert screen.count("\n") < 8  # redrawn in place
    assert "compiling: step" in screen
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "\n").strip().split("\n")[-1]
    parts = "epoch 2/2|100%|12,346 images/s|0:00 left|loss 0.0500|lr 0.1|data wait 3%|step 20/20"
    assert all(part in last for part in parts.split("|")), screen


def test_what_a_start_waits_for_stands_in_one_line_that_goes(tmp_path: Path) -> None:
    screen = in_terminal(STARTING)
    assert screen.count("\n") == 1  # that of the print
    shown = [part.replace("\r\n", "") for part in screen.split("\r\x1b[K")]
    assert shown[0] == ""
    assert shown[1].startswith("starting: loading a set with")
    assert len(shown[1]) == 119
    assert shown[2:] == ["starting: building a model", "a line", "starting again"]
    assert Command(sys.executable, "-c", STARTING).end().out == "a line\n"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda **options: Console(file=out, force_terminal=False, width=40, **options)
    )
    return out


def test_plain_lines_where_there_is_no_terminal(plain: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("lockstep.monitoring.progress.time.monotonic", lambda: float(next(clock)))
    bar = ProgressBar(100, 2, enabled=True)
    bar.write("a line that is longer than the forty columns of this console stays one line")
    for step in range(10, 60, 10):
        bar.update(step, 1, 0.5, 0.01, 1000.0, 0.25)
    tick = bar.counting("epoch 1/2: evaluation", 5000, 10)
    for _ in range(10):
        tick()
    bar.close()
    first, *lines = plain.getvalue().splitlines()
    assert first.endswith("stays one line")
    assert 2 <= len(lines) < 6  # not one a step
    numbers = r"1,000 images/s  0:\d\d left  loss 0\.5000  lr 0\.01  data wait 25%  step \d0/100"
    assert re.fullmatch(rf"epoch 1/2  \d0%  {numbers}", lines[0])
    assert re.fullmatch(r"epoch 1/2: evaluation  \d0%  [\d,]+ images/s  \d:\d\d left", lines[-1])


def test_a_run_of_days_writes_hundreds_of_lines(plain: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("lockstep.monitoring.progress.time.monotonic", lambda: now)
    bar = ProgressBar(10_000, 1, enabled=True)
    for step in range(1, 10_001):
        now += 40.0
        bar.update(step, 1, 0.5, 0.01, 1000.0)
    assert 200 < len(plain.getvalue().splitlines()) < 700


def test_quick_runs_say_nothing_between_and_other_ranks_nothing_at_all(plain: io.StringIO) -> None:
    for enabled in (True, False):
        bar = ProgressBar(100, 2, enabled=enabled)
        for step in range(1, 101):
            bar.update(step, 1, 0.5, 0.01, 1000.0)
        if not enabled:
            bar.write("digits")
            bar.doing("compiling: step")
        bar.close()
        assert plain.getvalue() == ""


PARTS = ["12,346 images/s", "1:23:45 left", "loss 0.0500", "lr 0.00123", "data wait 3%", "step 12345/99999"]


@pytest.mark.parametrize("width", range(20, 161, 5))
def test_the_line_fits_and_the_numbers_that_matter_stay_longest(width: int) -> None:
    line = compose("epoch 10/90", 0.5, PARTS, width)
    assert len(line) <= width
    kept = [part for part in PARTS if part in line]
    assert kept == PARTS[: len(kept)]
    more = "  ".join(["epoch 10/90", "50%", *PARTS[: len(kept) + 1]])
    assert kept == PARTS or len(more) > width  # the drawn bar takes no number's place
    assert len(kept) >= {20: 0, 40: 1, 60: 2, 80: 4, 120: 6, 160: 6}.get(width, 0)
    assert "━━━━━━━━━━━━────────────" in compose("epoch 10/90", 0.5, PARTS, 160)


def test_times_as_a_person_says_them() -> None:
    assert [clock(s) for s in (-1, 7, 754, 3723, 183845)] == ["0:00", "0:07", "12:34", "1:02:03", "2 d 03:04"]
    assert [duration(s) for s in (8.31, 754, 3723)] == ["8.3 s", "12:34 min", "1:02:03 h"]
