"""How a process ends: with its parent, on a signal, and in time."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, NoReturn

from lockstep.processes.tracker import remember_resources

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SERVE_S = 5.0  # what a loader worker gives a training process that stops
_LAUNCHER_STOPS = (*_STOPS, signal.SIGQUIT, signal.SIGUSR1)
_ORPHAN_S = 0.8  # that a process outlives its launcher at most


def end_with_parent(by: int = signal.SIGTERM) -> None:
    """From now on this child of multiprocessing gets the signal `by` when its parent is gone, and soon ends."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()  # on a pipe that only the parent holds open: no polling, and no mistaken pid
        os.kill(os.getpid(), by)
        time.sleep(_ORPHAN_S)  # a checkpoint under way may end well; it is whole or not there anyhow
        os._exit(128 + by)

    threading.Thread(target=wait, daemon=True).start()


def init_loader_worker(_: int) -> None:
    """The `worker_init_fn` of loaders: a worker ends with the process that it reads for, and not before.

    A terminal or a batch system signals the whole group; the training goes on to its next step boundary and needs
    batches until then.
    """
    end_with_parent(by=signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # multiprocessing, too, ends its children by SIGTERM, where the loader could not do it in its own way
    signal.signal(signal.SIGTERM, lambda *_: exit_after(_SERVE_S, 128 + signal.SIGTERM))


def start_helpers() -> None:
    """Start multiprocessing's helper processes of this one, so that they ignore the signals that ask a run to stop.

    Slurm and a terminal signal them too. They would end; a worker that they fork then never starts.
    """
    from multiprocessing import forkserver

    remember_resources()
    with blocked({signal.SIGUSR1, signal.SIGHUP}):
        resource_tracker.ensure_running()
        forkserver.ensure_running()


def raise_on_stop(grace_s: float, reason: Callable[[], BaseException | None] = lambda: None) -> None:
    """Let the first SIGINT, SIGTERM or SIGHUP raise in the main thread; `grace_s` seconds later the process ends.

    SIGINT raises KeyboardInterrupt, the others `reason()` or else SystemExit(128 + signal); later ones are ignored, so
    that nothing interrupts the cleaning up. Python runs no handler while the main thread is inside a collective that
    its peers have left: then the deadline ends the process.
    """
    awake, note = os.pipe()
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)  # written to at once, whatever Python is doing

    def watch() -> None:
        while (number := os.read(awake, 1)[0]) not in _STOPS:
            pass
        time.sleep(grace_s)
        os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()
    _raise_once(_STOPS, reason)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise SystemExit(143) inside: files are closed, loader workers go too. SIGINT stays Python's."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    if before == signal.SIG_DFL:
        _raise_once((signal.SIGTERM,), lambda: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_once(numbers: tuple[signal.Signals, ...], reason: Callable[[], BaseException | None]) -> None:
    wanted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup's wish is respected

    def stop(caught: int, _: FrameType | None) -> None:
        for number in wanted:
            signal.signal(number, signal.SIG_IGN)
        if caught == signal.SIGINT:
            raise KeyboardInterrupt
        raise reason() or SystemExit(128 + caught)

    for number in wanted:
        signal.signal(number, stop)


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Inside, these signals wait for this thread, and for the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class Notes:
    """Signals that were taken note of. `awake`: a descriptor that can be read when there are some."""

    awake: int
    came: list[int] = field(default_factory=list)

    def take(self) -> list[int]:
        """Those since the last call."""
        with suppress(BlockingIOError):
            os.read(self.awake, 1 << 10)
        numbers, self.came[:] = self.came[:], ()
        return numbers


@contextmanager
def noted(on_hangup: str) -> Iterator[Notes]:
    """Inside, what asks a launcher to stop raises nothing anywhere: it is noted, for who waits for its workers.

    Left alone: what it was started to ignore, SIGHUP where `--on-hangup` says so, and all outside the main thread.
    """
    awake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    notes = Notes(awake)

    def note(number: int, _: FrameType | None) -> None:
        if number != signal.SIGHUP or not survives_hangup(on_hangup):
            notes.came.append(number)
            with suppress(BlockingIOError):
                os.write(write, b"!")

    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in _LAUNCHER_STOPS}
    theirs = [n for n, handler in handlers.items() if handler in (signal.SIG_IGN, None)]  # None: set outside Python
    if handlers.get(signal.SIGHUP) != signal.SIG_DFL:
        theirs.append(signal.SIGHUP)
    for number in handlers.keys() - set(theirs):
        signal.signal(number, note)
    try:
        yield notes
    finally:
        for number in handlers.keys() - set(theirs):
            signal.signal(number, handlers[number])
        os.close(awake)
        os.close(write)


def exit_by(number: int) -> BaseException:
    """What a process raises that a signal has asked to stop."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def survives_hangup(on_hangup: str) -> bool:
    """What `--on-hangup` comes to at the moment when SIGHUP arrives; auto: True where the terminal is gone for good."""
    if on_hangup != "auto":
        return on_hangup == "continue"
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return True
    return False


def exit_after(seconds: float, code: int) -> None:
    """End this process by `exit_now` if it is still there in so many seconds."""
    timer = threading.Timer(seconds, exit_now, (code,))
    timer.daemon = True
    timer.start()


def exit_now(code: int) -> NoReturn:
    """End this process and its loader workers now, without waiting for collectives that nobody will finish."""
    for child in multiprocessing.active_children():
        child.kill()  # loader workers do not end on SIGTERM at once
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed at the other end
            stream.flush()
    os._exit(code)
