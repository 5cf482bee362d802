"""Processes that end with their parent, on a signal, and in time. None of them imports torch."""

import select
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep.processes.signals import end_with_parent, noted, sigterm_raises
from tests.subprocesses import Command, Ended

STOPPABLE = """
import os, signal, sys, time
from lockstep.processes.signals import raise_on_stop
raise_on_stop(1.0, lambda: {reason})
print("ready", flush=True)
try:
    {body}
except BaseException as error:
    print("ended by", type(error).__name__, flush=True)
    {cleanup}
    print("cleaned up", flush=True)
    raise
"""
WAIT = "time.sleep(60)"
# a call that no Python handler interrupts, and a signal when it has begun
IN_C = """import hashlib, threading
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"""


def stopped(*signals: int, body: str = WAIT, cleanup: str = "pass", reason: str = "None", nohup: bool = False) -> Ended:
    program = STOPPABLE.format(body=body, cleanup=cleanup, reason=reason)
    if nohup:
        program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + program
    command = Command(sys.executable, "-c", program)
    command.until(lambda: "ready" in command.said())
    for number in signals:
        command.signal(signal.Signals(number))
        time.sleep(0.1)
    return command.end()


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGINT, "KeyboardInterrupt", -signal.SIGINT),
        (signal.SIGTERM, "SystemExit", 143),
        (signal.SIGHUP, "SystemExit", 129),
    ],
)
def test_the_first_signal_raises_and_the_later_ones_do_not_disturb_the_cleaning_up(
    number: int, name: str, code: int
) -> None:
    ended = stopped(number, signal.SIGINT, signal.SIGTERM, cleanup="time.sleep(0.4)")
    assert ended.out.split("\n") == ["ready", f"ended by {name}", "cleaned up", ""], ended.text
    assert ended.code == code, ended.text


def test_a_reason_is_raised_in_place_of_the_exit() -> None:
    ended = stopped(signal.SIGTERM, reason="ValueError('rank 1 failed')")
    assert "ended by ValueError" in ended.out, ended.text


@pytest.mark.parametrize("case", ["in a call of C", "in the cleaning up"])
def test_a_process_that_does_not_stop_is_ended(case: str) -> None:
    ended = stopped(body=IN_C) if "C" in case else stopped(signal.SIGTERM, cleanup=WAIT)
    assert ended.code == 143, ended.text
    assert "cleaned up" not in ended.out


def test_nohup_is_respected() -> None:
    ended = stopped(signal.SIGHUP, body="time.sleep(0.5); print('done')", nohup=True)
    assert ended.out.split() == ["ready", "done"], ended.text
    assert ended.code == 0


def test_sigterm_becomes_an_exit_inside_and_is_itself_again_outside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, sigterm_raises():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_launcher_takes_note_of_signals_but_of_those_that_it_was_to_ignore() -> None:
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in stops}
    ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with noted("continue") as notes:
            for number in stops:
                signal.raise_signal(number)
            assert select.select([notes.awake], [], [], 0)[0]
            assert notes.take() == [signal.SIGINT, signal.SIGUSR1]
            assert not select.select([notes.awake], [], [], 0)[0]
        with noted("stop") as notes:
            signal.raise_signal(signal.SIGHUP)
            assert notes.take() == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGTERM, ignored)
    assert {number: signal.getsignal(number) for number in stops} == before


SERVERS = """
import multiprocessing, os, signal, time
from lockstep.processes.signals import start_helpers
def child():
    pass
if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    {call}
    multiprocessing.get_context("forkserver").Process(target=child).start()
    for number in (signal.SIGUSR1, signal.SIGHUP):
        os.killpg(0, number)
    time.sleep(0.5)
    later = multiprocessing.get_context("forkserver").Process(target=child)
    later.start()
    later.join()
"""


@pytest.mark.parametrize(("call", "survives"), [("start_helpers()", True), ("pass", False)])
def test_helpers_live_through_a_signal_to_the_whole_group(tmp_path: Path, call: str, survives: bool) -> None:
    script = tmp_path / "parent.py"
    script.write_text(SERVERS.format(call=call))
    ended = Command(sys.executable, str(script)).end(60)
    assert (ended.code == 0 and "died unexpectedly" not in ended.err) == survives, ended.text


PARENT = """
import multiprocessing, time
from lockstep.processes.signals import end_with_parent
def child(note):
    {call}
    note.set()
    time.sleep(60)
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    note = context.Event()
    context.Process(target=child, args=(note,)).start()
    note.wait()
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("call", ["end_with_parent()", "pass"])
def test_a_child_ends_with_a_parent_that_was_killed(tmp_path: Path, method: str, call: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(method=method, call=call))
    command = Command(sys.executable, str(script))
    command.until(lambda: "ready" in command.said())
    command.signal(signal.SIGKILL)
    ended = command.end(grace=10 if call != "pass" else 1)
    assert bool(ended.orphans) == (call == "pass"), ended.text  # without the call it does outlive its parent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM])
def test_a_loader_worker_goes_on_when_the_whole_group_is_signalled(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        PARENT.format(method="spawn", call="from lockstep.processes.signals import init_loader_worker as init; init(0)")
    )
    command = Command(sys.executable, str(script))
    command.until(lambda: "ready" in command.said())
    (worker,) = command.workers()
    command.signal(number, worker)
    time.sleep(0.5)
    assert command.workers() == [worker]
    command.signal(signal.SIGKILL)
    assert not command.end(grace=10).orphans


def test_a_process_without_a_parent_of_multiprocessing_goes_on() -> None:
    before = set(threading.enumerate())
    end_with_parent()
    assert set(threading.enumerate()) <= before, "nothing may wait for a parent that there is not"
