"""Start workers on this machine through torch's elastic launcher, or join those that a launcher started."""

import dataclasses
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from lockstep.config import Execution, Recovery
from lockstep.errors import EXIT_USER_ERROR, PeerError, UserError
from lockstep.processes import failures, signals
from lockstep.processes.devices import process_count
from lockstep.processes.environment import launcher_ranks, over_slurm_nodes
from lockstep.processes.failures import SHUTDOWN_S, WorkerFailed
from lockstep.processes.listening import LOOPBACK, STORE
from lockstep.processes.meeting import meeting_place, rendezvous_by
from lockstep.processes.output import unbreakable_output
from lockstep.processes.temporary import temporary_folder
from lockstep.processes.world import join

_LOOK_S = 0.5
_COLLECT_S = 2.0  # what a launcher that goes on needs to collect the values


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int | str = "auto",
    execution: Execution | None = None,
    recovery: Recovery | None = None,
    progress: Callable[[], int] = lambda: 0,
) -> list[Any]:
    """Run `fn(world, *args)` on `nproc` processes and return one value per local rank.

    Under torchrun, which has started the processes already, each runs `fn` itself and the list holds its own value. A
    single process runs it here. Otherwise workers are spawned: `fn` and `args` must be picklable and the call stand
    under `if __name__ == "__main__":`, as for torch.multiprocessing.spawn.

    `progress`: where the work has got to, asked after a restart; what comes no further goes on with fewer processes.

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
        error = UserError(
            "launch() was reached again while a worker imported the main script",
            'Put the call under `if __name__ == "__main__":`.',
        )
        if folder := os.environ.get(failures.FAILURES):
            failures.exit_with_failure(error, 0, Path(folder))
        raise error
    execution = over_slurm_nodes(execution)
    if launcher_ranks():
        return [_run_launched(fn, args, execution)]
    count = process_count(execution)
    if count == 1 and execution.nnodes == 1:
        return [_run_here(fn, args, execution)]
    return _supervise(fn, args, execution, count, recovery or Recovery(max_restarts=0), progress)


def _supervise(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    execution: Execution,
    count: int,
    recovery: Recovery,
    progress: Callable[[], int],
) -> list[Any]:
    """Start the workers, and again where one of them was killed or hung; with one less where that got nowhere."""
    restarts = recovery.max_restarts if execution.nnodes == 1 else 0  # the other machines' launchers would not know
    reached = progress()
    for attempt in itertools.count(1):
        try:
            return _start_workers(fn, args, execution, count, recovery)
        except WorkerFailed as failed:
            if not failed.transient or attempt > restarts:
                raise
            before, reached = reached, progress()
            if reached == before and attempt > 1 and count > recovery.min_nproc > 0:
                count -= 1
            message = f"lockstep: {failed}; restart {attempt} of {restarts} on {count} process(es)"
            print(message, file=sys.stderr, flush=True)
    raise AssertionError("unreachable")


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


def _start_workers(
    fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution, count: int, recovery: Recovery
) -> list[Any]:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they report failures too, in a page of their own

    def hung_up(number: int, _: object) -> None:
        if not signals.survives_hangup(recovery.on_hangup):
            raise SignalException("the terminal hung up", signal.Signals(number))

    meeting = meeting_place(execution)
    with temporary_folder() as folder:
        launcher = LaunchConfig(
            min_nodes=execution.nnodes,
            max_nodes=execution.nnodes,
            nproc_per_node=count,
            run_id="lockstep",
            **rendezvous_by(meeting),
            max_restarts=0,
            local_addr=LOOPBACK if execution.nnodes == 1 else None,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=signals.launcher_signals(),
        )
        environment = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # else torch talks about it; join() sets threads
            failures.FAILURES: folder,
            STORE: meeting.listens,
        }
        try:
            with signals.environment_variables(environment), signals.launch_handlers(), _stragglers_ended(Path(folder)):
                if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
                    signal.signal(signal.SIGHUP, hung_up)
                values = elastic_launch(launcher, _worker)(fn, args, execution, folder)
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
        except ChildFailedError as failed:
            raise failures.first_failure(Path(folder), failed) from None
        except (DistError, RendezvousError) as error:
            machine, place = f"machine {execution.node_rank} of {execution.nnodes}", f"{meeting.host}:{meeting.port}"
            raise UserError(
                f"{machine} did not meet the others at {place} in {execution.collective_timeout:g} s: {error}",
                "Check that the address is machine 0's, the port is open, and the command runs on every machine.",
            ) from error
    return [values[rank] for rank in sorted(values)]


@contextmanager
def _stragglers_ended(folder: Path) -> Iterator[None]:
    """Inside, once a worker has left its failure, end soon those that do not heed the signal to stop.

    A rank that stands in a collective on a GPU, or in C code that holds the interpreter, hears of no signal; torch's
    launcher waits half a minute for it, and the failure would be told only then.
    """
    before, over = {child.pid for child in psutil.Process().children()}, threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if failures.other_failure(folder) is not None and not over.wait(SHUTDOWN_S):
                for child in psutil.Process().children():
                    with suppress(psutil.Error):
                        if child.pid not in before and "resource_tracker" not in " ".join(child.cmdline()):
                            child.kill()
                return

    thread = threading.Thread(target=watch, name="lockstep-stragglers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _worker(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution, folder: str) -> Any:
    """What a spawned process runs: join, call, and leave its failure in a file.

    Where `fn` returns a signal, it stopped because of that. A launcher that got it too collects no values any more, and
    torch would keep this process waiting for that.
    """
    try:
        signals.end_with_parent()
        signals.raise_on_stop(SHUTDOWN_S, lambda: failures.other_failure(Path(folder)))
        with unbreakable_output(), join(execution) as world:
            value = fn(world, *args)
        if isinstance(value, signal.Signals):
            signals.exit_after(_COLLECT_S, 128 + value)
        return value
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # the launcher waits for a value or a failure
            return None
        failures.exit_with_failure(error, int(os.environ["RANK"]), Path(folder))
