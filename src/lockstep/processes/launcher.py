"""Start workers on this machine and look after them, or join those that a launcher started."""

import dataclasses
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from lockstep.config import Execution, Recovery
from lockstep.errors import EXIT_FAILURE, EXIT_USER_ERROR, PeerError, UserError
from lockstep.processes import failures, signals
from lockstep.processes.devices import process_count
from lockstep.processes.environment import launcher_ranks, over_slurm_nodes
from lockstep.processes.failures import SHUTDOWN_S, Failure, WorkerFailed, first_failure
from lockstep.processes.meeting import Meeting, meet, part
from lockstep.processes.proc import require_descriptors
from lockstep.processes.warm import UNGUARDED, Ended, Said, Signal, Start, WarmProcess
from lockstep.processes.world import join

_CHECKPOINT_S = 30.0  # what workers get to end after a signal
_SECOND_S = 1.0  # a terminal and a batch system may each send one and the same signal: within this it counts once


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int | str = "auto",
    execution: Execution | None = None,
    recovery: Recovery | None = None,
    progress: Callable[[], int] = lambda: 0,
    restarting: Callable[[str, int], object] = lambda *_: None,
) -> list[Any]:
    """Run `fn(world, *args)` on `nproc` processes and return one value per local rank.

    Under torchrun, which has started the processes already, each runs `fn` itself and the list holds its own value. A
    single process runs it here. Otherwise workers are started: in a script the call must stand under
    `if __name__ == "__main__":`, as for torch.multiprocessing.spawn. In a notebook `fn` may be what a cell defines; it
    goes to the workers with copies of the global variables that it uses.

    `progress`: where the work has got to, asked after a restart; what comes no further goes on with fewer processes.
    `restarting`: told before a restart why, and how many processes it starts.

    Raises:
        UserError: for a request that this machine can't meet.
        WorkerFailed: where a worker failed, with the first failure's message.
        PeerError: under torchrun, where this process stopped because another one failed.
        KeyboardInterrupt: on Ctrl-C, when all workers are gone.
    """
    execution = execution or Execution()
    if nproc != "auto":
        execution = dataclasses.replace(execution, nproc=nproc)  # type: ignore[arg-type]
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)
    execution = over_slurm_nodes(execution)
    if launcher_ranks():
        return [_run_launched(fn, args, execution)]
    count = process_count(execution)
    if count == 1 and execution.nnodes == 1:
        return [_run_here(fn, args, execution)]
    return _supervise(fn, args, execution, count, recovery or Recovery(max_restarts=0), progress, restarting)


def _supervise(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    execution: Execution,
    count: int,
    recovery: Recovery,
    progress: Callable[[], int],
    restarting: Callable[[str, int], object],
) -> list[Any]:
    """Start the workers, and again where one of them was killed or hung; with one less where that got nowhere."""
    restarts = recovery.max_restarts if execution.nnodes == 1 else 0  # the other machines' launchers would not know
    require_descriptors(count)
    warm, reached = WarmProcess(fn, args, execution, recovery.hang_timeout), progress()
    try:
        with signals.noted(recovery.on_hangup) as notes:
            for attempt in itertools.count(1):
                try:
                    return _attempt(warm, execution, count, notes)
                except WorkerFailed as failed:
                    if not failed.transient or attempt > restarts:
                        raise
                    before, reached = reached, progress()
                    if reached == before and attempt > 1 and count > recovery.min_nproc > 0:
                        count -= 1
                    message = f"lockstep: {failed}; restart {attempt} of {restarts} on {count} process(es)"
                    print(message, file=sys.stderr, flush=True)
                    restarting(str(failed), count)
                    if not warm.process.is_alive():
                        warm = WarmProcess(fn, args, execution, recovery.hang_timeout)
    finally:
        warm.close()
    raise AssertionError("unreachable")


def _attempt(warm: WarmProcess, execution: Execution, count: int, notes: signals.Notes) -> list[Any]:
    meeting = meet(execution, count, notes)
    values = _Attempt(warm, meeting, count, notes).run()
    part(execution, meeting.store, notes)
    return values


def _run_here(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution) -> Any:
    with signals.sigterm_raises(), join(execution) as world:
        return fn(world, *args)


def _run_launched(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution) -> Any:
    """Run `fn` as one of the processes that another launcher started."""
    rank = int(os.environ["RANK"])
    try:
        return _run_here(fn, args, execution)
    except UserError as error:
        if failures.reported_already(str(error)):
            raise SystemExit(EXIT_USER_ERROR) from error
        raise WorkerFailed(rank, str(error), EXIT_USER_ERROR) from error
    except Exception as error:
        if not failures.is_peer_loss(error):
            raise
        time.sleep(SHUTDOWN_S)  # the launcher must see the rank that failed go first; it ends this process meanwhile
        raise PeerError(f"rank {rank} lost another rank: {failures.last_line(error)}") from error


@dataclass
class _Attempt:
    """The workers of one start, from their first sign to their last."""

    warm: WarmProcess
    meeting: Meeting
    count: int
    notes: signals.Notes
    values: dict[int, Any] = field(default_factory=dict)
    told: list[Failure] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)  # before anybody asked them to: rank -> exit code
    gone: set[int] = field(default_factory=set)
    stop: int = 0  # the signal that asks for it
    stopped_at: float = 0.0
    kill_at: float = math.inf  # when those that are left are killed
    decide_at: float = math.inf  # when those that lost a rank are believed, though none says why

    def run(self) -> list[Any]:
        """Start them, wait for all, and return their values; raises WorkerFailed, and what the signals ask for."""
        for local_rank in range(self.count):
            environ = self.meeting.worker_environ(local_rank)
            self._send(Start(int(environ["RANK"]), environ))
        while len(self.gone) < self.count:
            seconds = max(0.0, min(self.kill_at, self.decide_at) - time.monotonic())
            sources = [self.warm.connection, self.warm.process.sentinel, self.notes.awake]
            ready = wait(sources, None if seconds == math.inf else seconds)
            for number in self.notes.take():
                self._asked(number)
            if self.warm.connection in ready or self.warm.process.sentinel in ready:
                self._hear()
            self._look_at_the_clock()
        if self.stop:
            raise signals.exit_by(self.stop)
        if self.told or any(self.ended.values()):
            raise first_failure(self.ended, self.told)  # in no variable: a circle with its traceback kept the store
        return [self.values.get(rank) for rank in sorted(self.gone)]

    def _hear(self) -> None:
        try:
            heard = self.warm.connection.recv()
        except (EOFError, OSError):
            self.warm.process.join()
            code = self.warm.process.exitcode or 0
            if code == UNGUARDED:
                raise UserError(
                    "launch() was reached again while a worker imported the main script",
                    'Put the call under `if __name__ == "__main__":`.',
                ) from None
            what = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            text = f"the process that starts the workers was {what}"
            raise WorkerFailed(self.meeting.first_rank, text, EXIT_FAILURE, transient=code < 0) from None
        match heard:
            case Said(rank, pickled):
                word = pickle.loads(pickled)
                if not isinstance(word, Failure):
                    self.values[rank] = word
                    return
                self.told.append(word)
                self._failed(word.cause)
            case Ended(rank, code):
                self.gone.add(rank)
                if self.kill_at == math.inf:
                    self.ended[rank] = code
                    if code and rank not in {failure.rank for failure in self.told}:
                        self._failed(True)

    def _failed(self, cause: bool) -> None:
        """End the others: at once where this is the cause, or else after a while in which that may show."""
        moment = time.monotonic()
        if not cause:
            self.decide_at = min(self.decide_at, moment + SHUTDOWN_S)
        elif self.kill_at == math.inf:
            self.kill_at = moment + SHUTDOWN_S
            self._send(Signal(signal.SIGTERM, f"{first_failure(self.ended, self.told)}"))

    def _asked(self, number: int) -> None:
        """Pass on a signal that asks the run to stop; another one a while later ends it now."""
        moment = time.monotonic()
        if not self.stop:
            self.stop, self.stopped_at = number, moment
            self.kill_at = min(self.kill_at, moment + _CHECKPOINT_S)
            self._send(Signal(number))
        elif moment - self.stopped_at >= _SECOND_S:
            self.kill_at = moment

    def _look_at_the_clock(self) -> None:
        moment = time.monotonic()
        if moment >= self.decide_at:
            self.decide_at = math.inf
            self._failed(True)
        if moment >= self.kill_at:
            self.kill_at = moment + SHUTDOWN_S  # once more, should one have been in the making
            self._send(Signal(signal.SIGKILL))

    def _send(self, request: Start | Signal) -> None:
        with suppress(OSError):  # it is gone, and all workers with it, as `_hear` will find
            self.warm.connection.send(request)
