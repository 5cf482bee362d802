"""Start the ranks of this machine and look after them, or join those that another launcher started."""

import dataclasses
import gc
import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch

from lockstep.config import Execution, Recovery
from lockstep.distributed import failures, proc, signals, warm
from lockstep.distributed.devices import process_count
from lockstep.distributed.environment import launcher_ranks, over_slurm_nodes
from lockstep.distributed.failures import SHUTDOWN_S, WorkerFailed, first_failure, how_it_ended
from lockstep.distributed.output import unbreakable_output
from lockstep.distributed.pickling import Work, pickled
from lockstep.distributed.rendezvous import meet, part, refusing_for_all
from lockstep.distributed.resize import HANDOVER, LAUNCHER, Resize, remove_states
from lockstep.distributed.warm import WarmProcess
from lockstep.distributed.world import join
from lockstep.errors import EXIT_FAILURE, EXIT_USER_ERROR, PeerError, UserError

Restarting = Callable[[str, int], object]
_CHECKPOINT_S = 30.0  # what workers get to end after a signal
_SECOND_S = 1.0  # a terminal and a batch system may each send one and the same signal: within this it counts once


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int | Literal["auto"] = "auto",
    execution: Execution | None = None,
    recovery: Recovery | None = None,
    restarting: Restarting = lambda *_: None,
) -> list[Any]:
    """Run `fn(world, *args)` on `nproc` processes and return one value per local rank.

    Under torchrun, which has started the processes already, each runs `fn` itself and the list holds its own value. A
    single process runs it here. Otherwise workers are started: in a script the call must stand under
    `if __name__ == "__main__":`. In a notebook `fn` may be what a cell defines; it goes to the workers with copies of
    the global variables that it uses. Where it returns a `Resize` on all ranks, as many others take their place.

    `restarting`: called before a restart with its cause and how many processes it starts.

    Raises:
        UserError: for a request that this machine can't meet.
        WorkerFailed: where a worker failed, with the first failure's message.
        PeerError: under torchrun, where this process stopped because another one failed.
        KeyboardInterrupt: on Ctrl-C, when all workers are gone.
    """
    execution = execution or Execution()
    if nproc != "auto":
        execution = dataclasses.replace(execution, nproc=nproc)
    warm.leave_an_import()
    failures.shorten_uncaught()
    execution = over_slurm_nodes(execution)
    if launcher_ranks():
        return [_run_launched(fn, args, execution)]
    with refusing_for_all(execution):
        count = process_count(execution)
        resize, payload = None, (Work(fn, args), execution)
        if count == 1 and execution.nnodes == 1:
            value = _run_here(fn, args, execution, payload)
            if not isinstance(value, Resize):
                return [value]
            resize = value
        recovery = recovery or Recovery(max_restarts=0)
        try:
            return _supervise(payload, count, recovery, restarting, resize)
        finally:
            signals.take_stops()  # if they are still held, an error came first


def _supervise(
    payload: tuple[Work, Execution], count: int, recovery: Recovery, restarting: Restarting, resize: Resize | None
) -> list[Any]:
    """Start the ranks, and others where they ask for that; again where one of them was killed or hung."""
    execution = payload[1]
    restarts = recovery.max_restarts if execution.nnodes == 1 else 0  # the other machines' launchers would not know
    proc.require_room(count, execution.threads, execution.workers)
    may_fork = torch.accelerator.current_accelerator(check_available=True) is None  # its driver bears no fork
    if resize is not None and not may_fork:
        gc.collect()  # what the rank that was this process held on the device
        torch.accelerator.empty_cache()
    attempt, server = 1, warm.take(payload, may_fork)
    try:
        with signals.collect_stop_signals() as stops:
            if resize is not None:
                signals.take_stops()
            while True:
                count, handover = (resize.nproc, resize.folder) if resize is not None else (count, "")
                try:
                    values = _Attempt(server, execution, count, stops, recovery.hang_timeout, handover).run()
                    resize = next((value for value in values if isinstance(value, Resize)), None)
                    if resize is None:
                        return values
                except WorkerFailed as failed:
                    resize = None  # they go on from a checkpoint
                    remove_states(mine=True)
                    if not failed.transient or attempt > restarts:
                        raise
                    line = f"lockstep: {failed}; restart {attempt} of {restarts} on {count} process(es)\n"
                    print(line, end="", file=sys.stderr, flush=True)
                    restarting(str(failed), count)
                    if not (server.process and server.process.is_alive()):
                        server = warm.begin(payload, may_fork)
                    attempt += 1
    finally:
        server.close()
        remove_states(mine=True)


def _run_here(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution, payload: Any = None) -> Any:
    """Run `fn` in this process. `payload`: of ranks that may take its place, for which the warm process is kept."""
    proc.require_room(1, execution.threads, execution.workers)
    value = None
    warm.prepare(payload)
    try:
        with signals.sigterm_raises(), join(execution) as world:
            value = fn(world, *args)
            return value
    finally:
        if not isinstance(value, Resize):
            warm.let_go()


def _run_launched(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution) -> Any:
    """Run `fn` as one of the processes that another launcher started."""
    rank = int(os.environ["RANK"])
    try:
        return _run_here(fn, args, execution)
    except UserError as error:
        if failures.reported_already(str(error)):
            raise SystemExit(EXIT_USER_ERROR) from error
        raise WorkerFailed(rank, f"{error}{failures.called_at(error)}", EXIT_USER_ERROR) from error
    except Exception as error:
        if not failures.is_peer_loss(error):
            raise
        time.sleep(SHUTDOWN_S)  # the launcher must see the rank that failed go first; it ends this process meanwhile
        raise PeerError(f"rank {rank} lost another rank: {failures.last_line(error)}") from error


def _run_rank(
    pipe: Connection, mask: set[int], payload: tuple[Work, Execution], rank: int, environ: dict[str, str]
) -> None:
    """What a rank does: call, report what came of it, and end.

    One signal at most raises (`raise_once`): so of two errors the second is that, and there is no third.
    """
    code, returned, (work, execution) = EXIT_FAILURE, False, payload
    try:
        try:
            os.environ.update(environ)
            signals.raise_once(signals.STOPS, lambda: PeerError(pipe.recv()) if pipe.poll() else None)
            held = signals.LAUNCHER_STOPS if HANDOVER in environ else ()  # until the state is there, and can be kept
            if held:
                signals.hold_stops()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask.union(held))  # what came since the start is heard here
            with unbreakable_output(), join(execution) as world:
                value = work.fn(world, *work.args)
            pipe.send_bytes(pickled(value))
            returned = True
        except BaseException as error:
            code = failures.send_failure(pipe, error, rank)
        signals.hold_stops()  # from here on it ends as it would
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    except (PeerError, SystemExit, KeyboardInterrupt, OSError, EOFError):  # asked to stop while it ended by itself
        pass
    if returned:
        signals.finish(f"rank {rank}", 0)
    signals.exit_now(code)


@dataclass
class _Attempt:
    """The ranks of one start, from their first sign to their last."""

    server: WarmProcess
    execution: Execution
    count: int
    stops: signals.StopSignals
    hang_timeout: float
    handover: str  # the folder with the state that they go on from; empty: none
    running: set[int] = field(default_factory=set)
    pipes: dict[int, Connection] = field(default_factory=dict)  # of ranks that may say something yet
    values: dict[int, Any] = field(default_factory=dict)
    failures: list[WorkerFailed] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)  # before anybody asked them to: rank -> exit code
    stop: int = 0  # the signal that asks for it
    stopped_at: float = 0.0
    kill_at: float = math.inf  # when those that are left are killed
    decide_at: float = math.inf  # when those that lost a rank are believed, though none says why

    def run(self) -> list[Any]:
        """Start them, wait for all, and return their values; raises WorkerFailed, and what the signals ask for."""
        store, environs = meet(self.execution, self.count, self.stops)
        own = {LAUNCHER: str(os.getpid())} | ({HANDOVER: self.handover} if self.handover else {})
        environs = [environ | own for environ in environs]
        ranks = [int(environ["RANK"]) for environ in environs]
        self.running.update(ranks)
        stopped_s = self.hang_timeout and self.hang_timeout + SHUTDOWN_S
        with suppress(ConnectionError):  # the warm process has ended, as `_note_exit` will find
            for rank, environ in zip(ranks, environs, strict=True):
                self.pipes[rank] = self.server.start(
                    -1 - rank, f"rank {rank}", _run_rank, rank, environ, stopped_s=stopped_s
                )
        while self.running:
            seconds = max(0.0, min(self.kill_at, self.decide_at) - time.monotonic())
            sources: list[Any] = [self.server.connection, self.stops.awake, *self.pipes.values()]
            ready = wait(sources, min(seconds, warm.LOOK_S))
            self.server.keep_awake()
            for number in self.stops.take():
                self._ask_to_stop(number)
            for rank in [rank for rank, pipe in self.pipes.items() if pipe in ready]:
                self._hear(rank)
            if self.server.connection in ready:
                self._note_exit()
            self._look_at_the_clock()
        whole = not self.failures and self.values.keys() == {*ranks}
        resized = whole and any(isinstance(value, Resize) for value in self.values.values())
        if self.stop and not resized:
            raise signals.exit_by(self.stop)
        if not whole:
            raise first_failure(self.ended, self.failures, self.values)  # in no variable: a circle would keep the store
        if self.stop:
            os.kill(os.getpid(), self.stop)  # those who go on shall keep the state, and stop
        part(self.execution, store)
        return [self.values[rank] for rank in ranks]

    def _hear(self, rank: int) -> None:
        """Take in what a rank reports: its value or its failure."""
        try:
            message = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):  # it has said all, or was killed in the middle of it
            self.pipes.pop(rank).close()
            return
        if isinstance(message, WorkerFailed):
            self.failures.append(message)
            self._fail(not message.transient)
        else:
            self.values[rank] = message

    def _note_exit(self) -> None:
        try:
            key, code = self.server.connection.recv()
        except (EOFError, OSError):
            if self.stop:
                raise signals.exit_by(self.stop) from None
            assert self.server.process is not None
            self.server.process.join(SHUTDOWN_S)
            code = self.server.process.exitcode
            text = f"the process that starts the ranks {how_it_ended(code)}"
            raise WorkerFailed(min(self.running), text, EXIT_FAILURE, transient=code is None or code < 0) from None
        if (rank := -1 - key) < 0:  # a loader worker of the rank that was this process
            return
        while rank in self.pipes and self.pipes[rank].poll():
            self._hear(rank)
        if pipe := self.pipes.pop(rank, None):
            pipe.close()
        self.running.discard(rank)
        if self.kill_at == math.inf:
            self.ended[rank] = code
            if rank not in {*self.values, *(failure.rank for failure in self.failures)}:
                self._fail(True)

    def _fail(self, cause: bool) -> None:
        """End the others: at once where this is the cause, or else after a while in which that may show."""
        moment = time.monotonic()
        if not cause:
            self.decide_at = min(self.decide_at, moment + SHUTDOWN_S)
        elif self.kill_at == math.inf:
            self.kill_at = moment + SHUTDOWN_S
            why = f"{first_failure(self.ended, self.failures, self.values)}"
            for pipe in self.pipes.values():
                with suppress(OSError):  # it is about to end
                    pipe.send(why)
            self.server.signal(signal.SIGTERM)

    def _ask_to_stop(self, number: int) -> None:
        """Pass on a signal that asks the run to stop; another one a while later ends it now."""
        moment = time.monotonic()
        if not self.stop:
            self.stop, self.stopped_at = number, moment
            self.kill_at = min(self.kill_at, moment + _CHECKPOINT_S)
            self.server.signal(number)
        elif moment - self.stopped_at >= _SECOND_S:
            self.kill_at = moment

    def _look_at_the_clock(self) -> None:
        moment = time.monotonic()
        if moment >= self.decide_at:
            self.decide_at = math.inf
            self._fail(True)
        if moment >= self.kill_at:
            self.kill_at = moment + SHUTDOWN_S  # once more, should one have been in the making
            self.server.signal(signal.SIGKILL)
