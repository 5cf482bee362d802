"""The warm process: what its launcher has imported is in it, and every worker of a run is forked from it.

Importing torch takes a process seconds of a core. The warm process is forked from the launcher, where that has no
threads that a fork would lose and no accelerator, whose driver bears no fork; otherwise a fresh interpreter imports
anew, once for all workers and all restarts. The kernel ends it with its launcher, and the workers with it.

It also ends a worker that a signal has stopped for too long. In training the other ranks' heartbeat is quicker, and
says more; there is none yet while they start, and none any more where they have ended.
"""

import atexit
import ctypes
import gc
import math
import os
import pickle
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from lockstep.config import Execution
from lockstep.errors import EXIT_FAILURE, EXIT_HANG, PeerError
from lockstep.processes import proc, signals
from lockstep.processes.failures import SHUTDOWN_S, failure_of
from lockstep.processes.output import unbreakable_output
from lockstep.processes.sending import Work, pickled
from lockstep.processes.world import join

_LINUX = sys.platform == "linux"
_DIE_WITH_PARENT, _ENDING_S = 1, 0.05  # of prctl(2); what a thread that was joined takes to leave the kernel's list
_LOOK_S = 0.5  # between two looks at what the workers do
_STOPS = (PeerError, SystemExit, KeyboardInterrupt)  # what a signal raises in a worker: signals.raise_on_stop
UNGUARDED = 97  # the exit code of a process that met launch() when it imported the main script


@dataclass(frozen=True)
class Start:
    """Asks the warm process for a worker."""

    rank: int
    environ: dict[str, str]


@dataclass(frozen=True)
class Signal:
    """Asks the warm process to send its workers a signal; `reason` is what they then stop for, if not that."""

    number: int
    reason: str = ""


@dataclass(frozen=True)
class Said:
    """What a worker came to: a value, or a Failure; pickled, and opened by the launcher alone."""

    rank: int
    pickled: bytes


@dataclass(frozen=True)
class Ended:
    """A worker's end, by its exit code, or the signal that killed it as a negative number."""

    rank: int
    code: int


class WarmProcess:
    """The warm process as its launcher sees it: send Start and Signal, receive Said and Ended."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution, hang_timeout: float
    ) -> None:
        task = (hang_timeout, signal.pthread_sigmask(signal.SIG_BLOCK, ()), Work(fn, args), execution)
        if _LINUX and torch.accelerator.current_accelerator(check_available=True) is None:
            self._start("fork", task)
            if _single_threaded():
                return
            self.close()
        with signals.blocked({signal.SIGUSR1, signal.SIGHUP}):
            resource_tracker.ensure_running()  # whose start would unblock others
        self._start("spawn", task)

    def _start(self, method: str, task: tuple[Any, ...]) -> None:
        context: Any = get_context(method)
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, os.getpid(), *task))
        with signals.blocked(signal.valid_signals()), warnings.catch_warnings():  # a group's signals are not for it
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, by Python 3.12: we look ourselves
            self.process.start()
        theirs.close()

    def close(self) -> None:
        """End it, and so what it has started."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _single_threaded() -> bool:
    """True where this process, after a fork, has one thread alone: OpenBLAS ends its own ones for a fork."""
    until = time.monotonic() + _ENDING_S
    while len([*Path("/proc/self/task").iterdir()]) > 1:
        if time.monotonic() > until:
            return False
        time.sleep(_ENDING_S / 10)
    return True


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, where it can; elsewhere a thread looks after that."""
    if not _LINUX:
        signals.end_with_parent()
        return
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # it was quicker


def _called(name: str) -> None:
    """What ps and top show as this process's name; at most 15 bytes."""
    if _LINUX:
        Path("/proc/self/comm").write_text(name)


def _serve(launcher: Connection, pid: int, hang_timeout: float, mask: set[int], *task: Any) -> None:
    """What the warm process does: start workers, pass on what they say and how they end, signal them."""
    _die_with(pid)
    _called("lockstep warm")
    gc.freeze()  # a collection in a worker would copy all that is imported
    context: Any = get_context("fork" if _LINUX else "spawn")
    workers: dict[int, BaseProcess] = {}
    pipes: dict[int, Connection] = {}
    looks, most = Counter[int](), math.ceil((hang_timeout + SHUTDOWN_S) / _LOOK_S)
    while True:
        sources: list[Any] = [launcher, *pipes.values(), *(worker.sentinel for worker in workers.values())]
        ready = wait(sources, _LOOK_S if workers and hang_timeout else None)
        if not ready:
            _kill_stopped(workers, looks, most)
        for rank in [rank for rank, pipe in pipes.items() if pipe in ready]:
            try:
                launcher.send(Said(rank, pipes[rank].recv_bytes()))
            except (EOFError, OSError):  # it has said all, or was killed in the middle of it
                pipes.pop(rank).close()
        for rank in [rank for rank, worker in workers.items() if worker.sentinel in ready and rank not in pipes]:
            worker = workers.pop(rank)
            worker.join()
            hung = looks.pop(rank, 0) >= most
            launcher.send(Ended(rank, EXIT_HANG if hung else worker.exitcode or 0))
        if launcher not in ready:
            continue
        match launcher.recv():
            case Start(rank, environ):
                pipes[rank], theirs = context.Pipe()
                workers[rank] = context.Process(target=_work, args=(theirs, os.getpid(), rank, environ, mask, *task))
                workers[rank].start()
                theirs.close()
            case Signal(number, reason):
                for rank, worker in workers.items():
                    if reason and rank in pipes:
                        with suppress(OSError):  # it is about to end
                            pipes[rank].send(reason)
                    os.kill(worker.pid or 0, number)


def _kill_stopped(workers: Mapping[int, BaseProcess], looks: Counter[int], most: int) -> None:
    """Kill the workers that so many looks in a row have found stopped. A debugger may hold one as long as it likes."""
    for rank, worker in workers.items():
        pid = worker.pid or 0
        if looks[rank] < most:
            looks[rank] = looks[rank] + 1 if proc.stopped(pid) else 0
            if looks[rank] == most:
                what = f"is {proc.state(pid)}; killed after {most * _LOOK_S:g} s (--hang-timeout)"
                print(f"lockstep: rank {rank} (pid {pid}) {what}", file=sys.stderr, flush=True)
                os.kill(pid, signal.SIGKILL)


def _work(pipe: Connection, pid: int, rank: int, environ: dict[str, str], mask: set[int], *task: Any) -> None:
    """What a worker does: call, say what came of it, and end.

    One signal at most raises (`raise_on_stop`): so of two errors the second is that, and there is no third.
    """
    code = EXIT_FAILURE
    try:
        try:
            atexit._clear()  # what the launcher wanted done at its end
            _die_with(pid)
            _called(f"lockstep rank {rank}")
            os.environ.update(environ)
            signals.raise_on_stop(SHUTDOWN_S, lambda: PeerError(pipe.recv()) if pipe.poll() else None)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what came since the start is heard here
            _call(pipe, *task)
            return
        except BaseException as error:
            failure = failure_of(error, rank)
            code = failure.code if failure else 0
            pipe.send_bytes(pickle.dumps(failure))
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    except (*_STOPS, OSError, EOFError):  # asked to stop while it ended by itself, or nobody is left to be told
        pass
    signals.exit_now(code)


def _call(pipe: Connection, work: Work, execution: Execution) -> None:
    with unbreakable_output(), join(execution) as world:
        value = work.fn(world, *work.args)
    pipe.send_bytes(pickled(value))
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # from here on it ends as it would
    atexit._run_exitfuncs()
