"""How a process ends: with its parent, on a signal, and in time."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SERVE_S = 5.0  # what a loader worker gives a training process that stops
_LAUNCHER_STOPS = (*_STOPS, signal.SIGQUIT, signal.SIGUSR1)
_ORPHAN_S = 0.8  # that a process outlives its launcher at most
stop_requested = threading.Event()  # set by a handler that only takes note of a signal


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

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGHUP})  # children inherit it
    try:
        resource_tracker.ensure_running()
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


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
def launch_handlers() -> Iterator[None]:
    """Around an elastic launch: workers are born with SIGINT blocked, and signal handlers are put back at the end.

    Without the first a Ctrl-C while the workers import torch shows one traceback each (`raise_on_stop` gets it when
    they have). Without the second torch's handlers stay for the rest of the process.
    """
    if threading.current_thread() is not threading.main_thread():  # only there can torch set handlers, or we
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _LAUNCHER_STOPS}  # None: set outside Python
    resource_tracker.ensure_running()  # its start would unblock the signal
    done = threading.Event()
    # blocking is by thread, and children inherit it from the one that starts them: this other thread hears SIGINT for
    # the process, and Python then runs the handler in the main thread as ever
    threading.Thread(target=done.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


@contextmanager
def environment_variables(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def launcher_signals() -> str:
    """The signals that end a launcher, as torch's elastic launcher wants them: those that it was not started to ignore.

    SIGHUP is not among them: `survives_hangup` decides about it.
    """
    stops = [number for number in _LAUNCHER_STOPS if number != signal.SIGHUP]
    return ",".join(number.name for number in stops if signal.getsignal(number) != signal.SIG_IGN)


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
