"""Processes that end with their parent, on a signal, and in time. None of them imports torch."""

import select
import signal
import sys
import threading
from pathlib import Path

import pytest

from lockstep.distributed.signals import collect_stop_signals, end_with_parent, sigterm_raises
from tests.subprocesses import Command, Completed

STOPPABLE = """
import os, signal, sys, time
from lockstep.distributed.signals import STOPS, raise_once
raise_once(STOPS, lambda: {reason})
try:
    os.write(1, b"ready\\n")  # in one piece, and within: the signal comes as soon as it is read
    {body}
except BaseException as error:
    print("ended by", type(error).__name__, flush=True)
    {cleanup}
    print("cleaned up", flush=True)
    raise
"""
WAIT = "time.sleep(60)"


def stopped(
    *signals: int, body: str = WAIT, go: Path | None = None, reason: str = "None", nohup: bool = False
) -> Completed:
    """`go`: a file that the cleaning up waits for; it is there when all signals have been sent."""
    cleanup = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)" if go else "pass"
    # whether or not these tests run under nohup
    program = f"import signal; signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if nohup else 'SIG_DFL'})\n"
    program += STOPPABLE.format(body=body, cleanup=cleanup, reason=reason)
    command = Command(sys.executable, "-c", program)
    command.until(lambda: "ready" in command.said())
    command.signal(signal.Signals(signals[0]))
    if signals[1:]:  # of two that wait, Python would take the lower number first
        command.until(lambda: "ended by" in command.said())
    for number in signals[1:]:
        command.signal(signal.Signals(number))
    if go:
        go.touch()
    return command.end()


def test_a_signal_is_heard_once_more_where_python_swallows_what_it_raised() -> None:
    """In a finalizer, which may run at any moment; the error is printed then, and nobody stops."""
    body = "type('Final', (), {'__del__': lambda _: (print('in it', flush=True), time.sleep(60))})(); time.sleep(60)"
    command = Command(sys.executable, "-c", STOPPABLE.format(body=body, cleanup="pass", reason="OSError('gone')"))
    command.until(lambda: "in it" in command.said())
    command.signal(signal.SIGTERM)
    ended = command.end()
    assert ended.out.split("\n") == ["ready", "in it", "ended by OSError", "cleaned up", ""], ended.text
    assert ended.err.splitlines()[-1] == "OSError: gone"
    assert "ignored" not in ended.err


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGINT, "KeyboardInterrupt", -signal.SIGINT),
        (signal.SIGTERM, "StoppedBySignal", 143),
        (signal.SIGHUP, "StoppedBySignal", 129),
    ],
)
def test_the_first_signal_raises_and_the_later_ones_do_not_disturb_the_cleaning_up(
    number: int, name: str, code: int, tmp_path: Path
) -> None:
    ended = stopped(number, signal.SIGINT, signal.SIGTERM, go=tmp_path / "go")
    assert ended.out.split("\n") == ["ready", f"ended by {name}", "cleaned up", ""], ended.text
    assert ended.code == code, ended.text


def test_a_reason_is_raised_in_place_of_the_exit() -> None:
    ended = stopped(signal.SIGTERM, reason="ValueError('rank 1 failed')")
    assert "ended by ValueError" in ended.out, ended.text


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


HELD = """
import os, signal, sys, threading, time
from lockstep.distributed.signals import collect_stop_signals, hold_stops, sigterm_raises, take_stops
from lockstep.training.control import stop_requests
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # it lets signals through
before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

def come(number):
    os.kill(os.getpid(), number)
    time.sleep(0.2)  # the other thread has it

with sigterm_raises():
    with stop_requests() as request:
        hold_stops()
        come(signal.SIGINT)
    come(signal.SIGTERM)
with collect_stop_signals() as notes:
    take_stops()
    print(request.signal, sorted(notes.take()))
print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before)
"""


def test_what_is_held_waits_whichever_thread_it_came_to() -> None:
    ended = Command(sys.executable, "-c", HELD).end()
    assert ended.out.split("\n") == [f"0 [{signal.SIGINT:d}, {signal.SIGTERM:d}]", "True", ""], ended.text


def test_a_launcher_takes_note_of_signals_but_of_those_that_it_was_to_ignore() -> None:
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in stops}
    ignored = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with collect_stop_signals() as notes:
            for number in stops:
                signal.raise_signal(number)
            assert select.select([notes.awake], [], [], 0)[0]
            assert notes.take() == [signal.SIGINT, signal.SIGUSR1]
            assert not select.select([notes.awake], [], [], 0)[0]
    finally:
        signal.signal(signal.SIGTERM, ignored)
    assert {number: signal.getsignal(number) for number in stops} == before


PARENT = """
import multiprocessing, time
from lockstep.distributed.signals import end_with_parent
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


@pytest.mark.parametrize(
    ("method", "call"), [("spawn", "end_with_parent()"), ("forkserver", "end_with_parent()"), ("spawn", "pass")]
)
def test_a_child_ends_with_a_parent_that_was_killed(tmp_path: Path, method: str, call: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(method=method, call=call))
    command = Command(sys.executable, str(script))
    command.until(lambda: "ready" in command.said())
    command.signal(signal.SIGKILL)
    ended = command.end(grace=10 if call != "pass" else 1)
    assert bool(ended.orphans) == (call == "pass"), ended.text  # without the call it does outlive its parent


def test_a_process_without_a_parent_of_multiprocessing_goes_on() -> None:
    before = set(threading.enumerate())
    end_with_parent()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), "nothing may wait for a parent that there is not"
