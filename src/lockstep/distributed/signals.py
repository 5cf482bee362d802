"""How a process ends: with its parent, on a signal, and in time."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from lockstep.distributed.proc import end_leftovers
from lockstep.errors import StoppedBySignal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAUNCHER_STOPS = (*STOPS, signal.SIGQUIT, signal.SIGUSR1)
_AGAIN_S = 0.01
_LINGER_S = 10.0  # what threads and processes of user code get to end after everything else
_held: list[int] | None = None  # what came while `hold_stops` keeps it; None: nothing is kept
_usual = sys.unraisablehook  # for what is not ours
_put_back: dict[int, Any] = {}  # handlers to set when it does so no longer


def end_with_parent() -> None:
    """From now on this child of multiprocessing ends when its parent is gone."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()  # on a pipe that only the parent holds open: no polling, and no mistaken pid
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def raise_once(numbers: Iterable[int], reason: Callable[[], BaseException | None] = lambda: None) -> None:
    """Let the first of these signals raise in the main thread; later ones are ignored, so the cleaning up goes on.

    SIGINT raises KeyboardInterrupt, the others `reason()` or else StoppedBySignal. What was ignored stays so (nohup).
    Where Python swallows what it raised, as in a finalizer, the signal raises the same again a moment later.
    """
    global _usual
    if sys.unraisablehook is not _unraisable:
        _usual, sys.unraisablehook = sys.unraisablehook, _unraisable
    swallowed: list[BaseException] = []
    wanted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def stop(caught: int, _: FrameType | None) -> None:
        if is_held(caught):
            return
        for number in wanted:
            signal.signal(number, signal.SIG_IGN)
        again = partial(hear_again, caught)
        raise _marked(
            swallowed.pop() if swallowed else (caught != signal.SIGINT and reason()) or exit_by(caught), again
        )

    def hear_again(caught: int, error: BaseException) -> None:
        swallowed.append(error.with_traceback(None))
        for number in wanted:
            signal.signal(number, stop)
        timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), caught))  # not here, where it would be swallowed too
        timer.daemon = True
        with suppress(RuntimeError):  # there are no more threads
            timer.start()

    for number in wanted:
        signal.signal(number, stop)


def _marked(error: BaseException, again: Callable[[BaseException], None]) -> BaseException:
    """The error, marked, so that it is known where it is swallowed. Where it is raised no variable may keep it."""
    error.__dict__["hear_again"] = again
    return error


def _unraisable(found: "sys.UnraisableHookArgs") -> None:
    """Python's hook for what can be raised nowhere."""
    again = getattr(found.exc_value, "hear_again", None)
    if again is not None:
        again(found.exc_value)
    else:
        _usual(found)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise StoppedBySignal inside, so that files are closed. SIGINT stays Python's."""
    before = signal.getsignal(signal.SIGTERM)
    raises = before == signal.SIG_DFL and threading.current_thread() is threading.main_thread()  # which alone may
    if raises:
        raise_once([signal.SIGTERM])
    try:
        yield
    finally:
        if raises:
            set_handlers({signal.SIGTERM: before})


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Inside, these signals wait for this thread, and for the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hold_stops() -> None:
    """From now on what asks this process to stop waits, until `take_stops`: its state is on the way to other ranks.

    Blocking alone would not do: a signal goes to any thread that lets it through, and its handler runs in this one.
    """
    global _held
    _held = []
    signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_STOPS)


def is_held(number: int) -> bool:
    """Whether a signal that has come waits for `take_stops`, which is the end of it for its handler."""
    if _held is not None:
        _held.append(number)
    return _held is not None


def set_handlers(handlers: Mapping[Any, Any]) -> None:
    """Put handlers back, as a context ends; while signals are held, later."""
    if _held is not None:
        _put_back.update(handlers)
        return
    for number, handler in handlers.items():
        signal.signal(number, handler)


def take_stops() -> None:
    """What has been held is heard now, and what comes from now on at once."""
    global _held
    if _held is None:
        return
    came, _held = _held, None
    set_handlers(_put_back)
    _put_back.clear()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_STOPS)
    for number in dict.fromkeys(came):
        os.kill(os.getpid(), number)


@dataclass
class StopSignals:
    """Signals that ask a launcher to stop. `awake`: a descriptor that can be read when there are some."""

    awake: int

    def take(self) -> list[int]:
        """Those since the last call."""
        with suppress(BlockingIOError):
            return [*os.read(self.awake, 1 << 10)]
        return []


@contextmanager
def collect_stop_signals() -> Iterator[StopSignals]:
    """Inside, what asks a launcher to stop raises nothing anywhere: it is noted, for who waits for its workers.

    A terminal that closes (SIGHUP) does not ask. Left alone: what it was started to ignore, a handler of SIGHUP's, and
    all outside the main thread.
    """
    awake, write = os.pipe()
    os.set_blocking(awake, False)
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: _put_back.pop(number, signal.getsignal(number)) for number in LAUNCHER_STOPS}
        before = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
        if found[signal.SIGHUP] != signal.SIG_DFL:
            before.pop(signal.SIGHUP, None)
    for number in before:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
            continue
        signal.signal(number, lambda number, _: os.write(write, bytes([number])))
    try:
        yield StopSignals(awake)
    finally:
        set_handlers(before)
        os.close(awake)
        os.close(write)


def exit_by(number: int) -> BaseException:
    """What a process raises that a signal has asked to stop."""
    return KeyboardInterrupt() if number == signal.SIGINT else StoppedBySignal(128 + number)


def finish(who: str, code: int, known: Collection[int] = ()) -> NoReturn:
    """End this process much as the interpreter does, but in time: what user code has left running is named and ended.

    The interpreter's own end waits for threads and processes for ever, and may abort: gloo's threads outlive the
    process group, and want the interpreter's lock. `known`: child processes that are none of its business.
    """

    def give_up() -> None:
        threads = [each.name for each in threading.enumerate() if not each.daemon and each.name != "MainThread"]
        what = f"thread {', '.join(threads)}" if threads else "a process, or a function of atexit"
        text = f"lockstep: {who} still runs {_LINGER_S:g} s after its end: {what}; it is ended now\n"
        print(text, end="", file=sys.stderr)
        end_leftovers(who, known)
        exit_now(code)

    timer = threading.Timer(_LINGER_S, give_up)
    timer.daemon = True
    with suppress(RuntimeError):  # this user may have no more threads
        timer.start()
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    timer.cancel()
    for child in multiprocessing.active_children():
        if child.daemon:  # as of a pool: not meant to outlive this process
            child.kill()
    end_leftovers(who, known)
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End this process now, without waiting for collectives that nobody will finish."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed at the other end
            stream.flush()
    os._exit(code)
