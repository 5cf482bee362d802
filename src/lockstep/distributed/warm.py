"""The warm process, from which the ranks of a run and their loader workers are forked.

Importing torch takes a process seconds of a core. The warm process is a fork of the one that begins it, if that has
one thread: a fork would lose the others. Otherwise it is a fresh interpreter that imports once, for all processes and
all restarts. The kernel ends it with its owner, and what it has started with it.
"""

import atexit
import ctypes
import gc
import importlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, cast

from lockstep.distributed import proc, signals
from lockstep.distributed.environment import restore_variables
from lockstep.distributed.failures import send_failure
from lockstep.errors import EXIT_HANG, EXIT_USER_ERROR

_DIE_WITH_PARENT, _SET_NAME, _ADOPT_ORPHANS = 1, 15, 36  # of prctl(2)
_ENDING_S = 0.05  # what a thread that was joined takes to leave the kernel's list
LOOK_S = 0.5  # between two looks for stopped processes
_EXIT_S = 5.0  # from a closed pipe to the end of its process
_LIBRARIES = {"lockstep", "torchvision"}  # which take seconds to import, and begin no threads
# Of a fresh interpreter while it imports: a main script that computes there would have OpenMP's threads, a fork loses
# them, and waits for them for ever as soon as it takes several itself. numpy's are ended for a fork, and begun again.
_THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True)
class Start:
    """Asks for a process that calls `target(pipe, mask, payload, *args)`; the end of its pipe follows."""

    key: int
    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    stopped_s: float  # after which it is killed where a signal has stopped it; 0: never
    imports: list[str]  # modules that the one who asks has, which each process would else import by itself


class WarmProcess:
    """The warm process as a client sees it: its owner, or a process that it has started.

    What comes over `connection` is (key, code) of each process that has ended; code is a killing signal's, negative.
    """

    def __init__(self, connection: Connection, process: BaseProcess | None = None, payload: Any = None) -> None:
        self.connection, self.process, self.payload = connection, process, payload  # the last two: the owner's alone
        self._lock, self._exits = threading.Lock(), dict[int, int]()
        self._stopped_at = math.inf  # since when it has been found stopped

    def start(self, key: int, name: str, target: Callable[..., Any], *args: Any, stopped_s: float = 0.0) -> Connection:
        """Start a process; returns our end of its pipe. Raises ConnectionError where the warm process has ended."""
        ours, theirs = Pipe()
        with self._lock, theirs:
            with suppress(EOFError):  # what nobody asks for would fill the pipe, and hold up the one that reports it
                while self.connection.poll():
                    self._exits.update([self.connection.recv()])
            self.connection.send(Start(key, name, target, args, stopped_s, _imported()))
            send_handle(self.connection, theirs.fileno(), 0)
        return ours

    def signal(self, number: int) -> None:
        """Send a signal to all processes that this client has started."""
        with suppress(ConnectionError):  # it has ended, and they with it
            self.connection.send(number)

    def keep_awake(self) -> None:
        """Let it go on where a signal has stopped it: it would start, signal and report nothing. Called by its owner.

        Not at once: a scheduler may be about to stop the owner as well.
        """
        pid, moment = (self.process and self.process.pid) or 0, time.monotonic()
        self._stopped_at = min(self._stopped_at, moment) if proc.stopped(pid) else math.inf
        if moment - self._stopped_at >= LOOK_S:
            what = f"the process that starts ranks and loader workers (pid {pid}) is {proc.state(pid)}"
            print(f"lockstep: {what}; it is told to go on\n", end="", file=sys.stderr, flush=True)
            proc.wake(pid, 0)

    def exit_code(self, key: int) -> int | None:
        """How a process ended whose pipe is closed; None where that is not known."""
        with self._lock, suppress(EOFError, ConnectionError):
            while key not in self._exits and self.connection.poll(_EXIT_S):
                self._exits.update([self.connection.recv()])
        return self._exits.pop(key, None)

    def close(self) -> None:
        """End it, and so what it has started."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.connection.close()


def _imported() -> list[str]:
    """The modules of these libraries that this process has."""
    names = [name for name in [*sys.modules] if name.partition(".")[0] in _LIBRARIES]
    return [name for name in names if getattr(sys.modules.get(name), "__spec__", None) is not None]


def _import(names: Sequence[str]) -> None:
    """Import what this process lacks of these modules; what fails does so where it is used."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        with suppress(Exception):
            importlib.import_module(name)
    if missing:
        gc.freeze()  # a collection in a process that was forked would copy all that is imported


_current: WarmProcess | None = None  # which this process may ask
_lock = threading.Lock()


def begin(payload: Any = None, may_fork: bool = True) -> WarmProcess:
    """Start a warm process. `payload`: given to all that it starts; pickled for a fresh interpreter alone."""
    return (_fork(payload) if may_fork else None) or _start_server("spawn", payload)


def prepare(payload: Any = None) -> None:
    """Fork a warm process for the loader workers of this one, and ranks after it, while that has no threads yet."""
    if _current is None and (begun := _fork(payload)) is not None:
        _keep(begun)


def take(payload: Any, may_fork: bool) -> WarmProcess:
    """The warm process that `prepare` began with this payload, or else another one; the caller's from now on."""
    global _current
    if may_fork and _current is not None and _current.payload is payload:
        taken, _current = _current, None
        return taken
    let_go()
    return begin(payload, may_fork)


def at_hand() -> bool:
    """Whether there is one, or one can be forked: a fresh interpreter would cost seconds."""
    prepare()
    return _current is not None


def current(lost: WarmProcess | None = None) -> WarmProcess:
    """The warm process that this one may ask. `lost`: one that has ended, in whose place another is begun."""
    with _lock:
        if _current is None or _current is lost:
            leave_an_import()
            return _keep(begin())
        return _current


def _keep(begun: WarmProcess) -> WarmProcess:
    global _current
    _current = begun
    Finalize(None, let_go, exitpriority=0)  # as a process of multiprocessing ends, it runs none of atexit's
    return begun


def let_go() -> None:
    """End the warm process that `prepare` or `current` began."""
    global _current
    if _current is not None and _current.process is not None:
        _current.close()
        _current = None


def leave_an_import() -> None:
    """End a fresh interpreter that comes here as it imports the main script: that has no guard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(
            "lockstep: launch() was reached again while a process imported the main script\n"
            '  Put the call under `if __name__ == "__main__":`.'
        )


def _fork(payload: Any) -> WarmProcess | None:
    """A fork of this process; None where that has threads, also such as Python does not know."""
    if threading.active_count() > 1:
        return None
    begun, until, tasks = _start_server("fork", payload), time.monotonic() + _ENDING_S, Path("/proc/self/task")
    with suppress(OSError):  # no /proc: nobody can tell
        while (threads := len([*tasks.iterdir()])) > 1 and time.monotonic() < until:
            time.sleep(_ENDING_S / 10)  # OpenBLAS ends its own for a fork
        if threads == 1:
            return begun
    begun.close()
    return None


def _start_server(method: str, payload: Any) -> WarmProcess:
    if method == "spawn":
        with signals.blocked({signal.SIGUSR1, signal.SIGHUP}):
            resource_tracker.ensure_running()  # whose start would unblock others
    ours, theirs = Pipe()
    # the kernel takes the end of the thread that starts it for its parent's
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    before = {name: os.environ.get(name) for name in _THREADS}
    args = before, theirs, parent, signal.pthread_sigmask(signal.SIG_BLOCK, ()), payload
    process: BaseProcess = cast(Any, multiprocessing.get_context(method)).Process(target=_serve, args=args)
    if method == "spawn":
        os.environ.setdefault("OPENBLAS_NUM_THREADS", before["OMP_NUM_THREADS"] or str(os.cpu_count()))
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        with theirs, signals.blocked(signal.valid_signals()), warnings.catch_warnings():  # a group's are not for it
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, by Python 3.12: we look ourselves
            process.start()
    finally:
        restore_variables(before)
    return WarmProcess(ours, process, payload)


def _settle(name: str, parent: int) -> None:
    """Give this process a name, and have the kernel kill it when its parent ends."""
    ctypes.CDLL(None).prctl(_SET_NAME, f"lockstep {name}".encode(), 0, 0, 0)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL if parent else 0, 0, 0, 0)
    if os.getppid() != parent > 0:
        os._exit(128 + signal.SIGKILL)  # it was quicker


@dataclass
class _Child:
    """A process that the warm process has started."""

    process: BaseProcess
    start: Start
    client: Connection  # of the process that asked for it
    own: Connection  # through which it may ask
    stopped_s: float = 0.0  # for how long it has been found stopped
    hung: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid or 0


def _serve(environ: dict[str, str | None], owner: Connection, parent: int, *given: Any) -> None:
    """What the warm process does: start processes, signal them, and report how they end."""
    restore_variables(environ)
    _settle("warm", parent)
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)  # what a rank leaves running becomes our child
    gc.freeze()  # a collection in a process that was forked would copy all that is imported
    known = proc.children()  # that the main script's import has started
    ended, ends = os.pipe()
    signal.signal(signal.SIGCHLD, lambda *_: os.write(ends, b"1"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    context, children = cast(Any, multiprocessing.get_context("fork")), list[_Child]()
    while True:
        clients = [owner, *(child.own for child in children if not child.own.closed)]
        ready = wait([ended, *clients], LOOK_S if any(child.start.stopped_s for child in children) else None)
        if not ready:
            _kill_stopped(children)
        if ended in ready:
            os.read(ended, 1 << 10)
        for child in [child for child in children if child.process.exitcode is not None]:
            children.remove(child)
            _report_end(child, children, known)
        for client in [client for client in clients if client in ready and not client.closed]:
            try:
                request: Start | int = client.recv()
                if isinstance(request, int):
                    _signal(children, client, request)
                    continue
                pipe, (own, theirs) = Connection(recv_handle(client)), Pipe()
                _import(request.imports)
                args = [*clients, own], os.getpid(), theirs, request, pipe, *given
                process: BaseProcess = context.Process(target=_run, args=args)
                with pipe, theirs:
                    try:
                        process.start()
                        children.append(_Child(process, request, client, own))
                    except OSError as error:  # the system refuses: as if the process had failed
                        send_failure(pipe, error, request.key)
                        client.send((request.key, EXIT_USER_ERROR))
            except (EOFError, ConnectionError):
                if client is owner:
                    os._exit(0)
                client.close()
                _signal(children, client, signal.SIGKILL)  # nobody reads what they send


def _run(
    inherited: Sequence[Connection], parent: int, own: Connection, request: Start, pipe: Connection, *given: Any
) -> None:
    """What a started process does."""
    global _current
    for connection in inherited:
        connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    atexit._clear()  # what the owner wanted done at its end
    _settle(request.name, parent)
    _current = WarmProcess(own)
    request.target(pipe, *given, *request.args)


def _signal(children: list[_Child], client: Connection, number: int) -> None:
    """Signal all that a client has started."""
    for child in children:
        if child.client is client and child.process.exitcode is None:
            os.kill(child.pid, number)


def _report_end(child: _Child, others: list[_Child], known: set[int]) -> None:
    """Clear away what a process has left, and tell who asked for it how it ended."""
    _signal(others, child.own, signal.SIGKILL)
    child.own.close()
    proc.end_leftovers(child.start.name, known | {other.pid for other in others})
    with suppress(OSError):  # its client has ended too
        child.client.send((child.start.key, EXIT_HANG if child.hung else child.process.exitcode or 0))


def _kill_stopped(children: list[_Child]) -> None:
    """Kill what a signal has stopped for as long as it may, if it has not stopped the owner too, as Ctrl-Z does.

    A debugger may hold a process as long as it likes.
    """
    for child in children:
        alone = proc.stopped(child.pid) and not proc.stopped(os.getppid())
        child.stopped_s = child.stopped_s + LOOK_S if alone else 0.0
        if 0 < child.start.stopped_s <= child.stopped_s and not child.hung:
            child.hung = True
            what = f"is {proc.state(child.pid)}; killed after {child.stopped_s:g} s (--hang-timeout)"
            print(f"lockstep: {child.start.name} (pid {child.pid}) {what}\n", end="", file=sys.stderr, flush=True)
            os.kill(child.pid, signal.SIGKILL)
