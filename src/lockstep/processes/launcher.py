"""Start workers on this machine through torch's elastic launcher, or join those that a launcher started."""

import dataclasses
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.config import Execution, Recovery
from lockstep.errors import EXIT_USER_ERROR, PeerError, UserError
from lockstep.processes.failures import (
    FAILURES,
    SHUTDOWN_S,
    fail,
    first_failure,
    is_peer_loss,
    last_line,
    other_failure,
    reported_already,
)
from lockstep.processes.failures import WorkerFailed as WorkerFailed
from lockstep.processes.signals import (
    end_with_parent,
    ended_by_sigterm,
    heeded,
    launching,
    leave_after,
    stop_in_time,
    survives_hangup,
    variables,
)

_COLLECT_S = 2.0  # what a launcher that goes on needs to collect the values


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int | str = "auto",
    execution: Execution | None = None,
    recovery: Recovery | None = None,
    position: Callable[[], int] = lambda: 0,
) -> list[Any]:
    """Run `fn(world, *args)` on `nproc` processes and return one value per local rank.

    Under torchrun, which has started the processes already, each runs `fn` itself and the list holds its own value. A
    single process runs it here. Otherwise workers are spawned: `fn` and `args` must be picklable and the call stand
    under `if __name__ == "__main__":`, as for torch.multiprocessing.spawn.

    Raises:
        UserError: for a request that this machine can't meet.
        WorkerFailed: where a worker failed, with the first failure's message.
        PeerError: under torchrun, where this process stopped because another one failed.
        KeyboardInterrupt: on Ctrl-C, when all workers are gone.
    """
    from lockstep.processes.devices import processes
    from lockstep.processes.environment import spread
    from lockstep.processes.world import joined

    if execution is None:
        execution = Execution(nproc=nproc)  # type: ignore[arg-type]
    elif nproc != "auto":
        execution = dataclasses.replace(execution, nproc=nproc)  # type: ignore[arg-type]
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        error = UserError(
            "launch() was reached again while a worker imported the main script",
            'Put the call under `if __name__ == "__main__":`.',
        )
        if folder := os.environ.get(FAILURES):
            fail(error, 0, Path(folder))
        raise error
    execution = spread(execution)
    if joined():
        return [_joined(fn, args, execution)]
    count = processes(execution)
    if count == 1 and execution.nnodes == 1:
        return [_here(fn, args, execution)]
    return _supervise(fn, args, execution, count, recovery or Recovery(max_restarts=0), position)


def _supervise(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    execution: Execution,
    count: int,
    recovery: Recovery,
    position: Callable[[], int],
) -> list[Any]:
    """Start the workers, and again where one of them was killed or hung; with one less where that got nowhere."""
    restarts = recovery.max_restarts if execution.nnodes == 1 else 0  # the other machines' launchers would not know
    reached = position()
    for attempt in itertools.count(1):
        try:
            return _start(fn, args, execution, count, recovery)
        except WorkerFailed as failed:
            if not failed.transient or attempt > restarts:
                raise
            before, reached = reached, position()
            if reached == before and attempt > 1 and count > recovery.min_nproc > 0:
                count -= 1
            print(
                f"lockstep: {failed}; restart {attempt} of {restarts} on {count} process(es)",
                file=sys.stderr,
                flush=True,
            )
    raise AssertionError("unreachable")


def _here(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution) -> Any:
    from lockstep.processes.world import join

    with ended_by_sigterm(), join(execution) as world:
        return fn(world, *args)


def _joined(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution) -> Any:
    """Run `fn` as one of the processes that another launcher started."""
    rank = int(os.environ["RANK"])
    try:
        return _here(fn, args, execution)
    except UserError as error:
        if reported_already(str(error)):
            raise SystemExit(EXIT_USER_ERROR) from error
        raise WorkerFailed(rank, str(error), EXIT_USER_ERROR) from error
    except Exception as error:
        if not is_peer_loss(error):
            raise
        time.sleep(SHUTDOWN_S)  # the launcher must see the rank that failed go first; it ends this process meanwhile
        raise PeerError(f"rank {rank} lost another rank: {last_line(error)}") from error


def _start(
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
        if not survives_hangup(recovery.on_hangup):
            raise SignalException("the terminal hung up", signal.Signals(number))

    endpoint = _endpoint(execution)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        launcher = LaunchConfig(
            min_nodes=execution.nnodes,
            max_nodes=execution.nnodes,
            nproc_per_node=count,
            run_id="lockstep",
            rdzv_backend="c10d" if execution.nnodes == 1 else "static",
            rdzv_endpoint=endpoint,
            rdzv_configs={"rank": execution.node_rank, "timeout": int(execution.collective_timeout)}
            if execution.nnodes > 1
            else {"is_host": True},
            max_restarts=0,
            local_addr="localhost" if execution.nnodes == 1 else None,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=heeded(),
        )
        environment = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # else torch talks about it; join() sets threads
            FAILURES: folder,
        }
        try:
            with variables(environment), launching():
                if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
                    signal.signal(signal.SIGHUP, hung_up)
                values = elastic_launch(launcher, _worker)(fn, args, execution, folder)
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
        except ChildFailedError as failed:
            raise first_failure(Path(folder), failed) from None
        except (DistError, RendezvousError) as error:
            raise UserError(
                f"machine {execution.node_rank} of {execution.nnodes} did not meet the others at {endpoint} "
                f"in {execution.collective_timeout:g} s: {error}",
                "Check that the address is machine 0's, the port is open, and the command runs on every machine.",
            ) from error
    return [values[rank] for rank in sorted(values)]


def _endpoint(execution: Execution) -> str:
    """Where the processes meet; on one machine port 0, a free one, unless another was asked for."""
    host = execution.master_addr if execution.nnodes > 1 else "localhost"
    if execution.master_port and execution.node_rank == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", execution.master_port))
            except OSError as error:
                raise UserError(
                    f"--master-port {execution.master_port} is in use on this machine",
                    "Name another." if execution.nnodes > 1 else "Leave the flag out, or name another.",
                ) from error
    return f"{host}:{execution.master_port}"


def _worker(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution, folder: str) -> Any:
    """What a spawned process runs: join, call, and leave word where it fails.

    Where `fn` returns a signal, it stopped because of that. A launcher that got it too collects no values any more, and
    torch would keep this process waiting for that.
    """
    try:
        end_with_parent()
        stop_in_time(SHUTDOWN_S, lambda: other_failure(Path(folder)))
        from lockstep.processes.world import join

        with join(execution) as world:
            value = fn(world, *args)
        if isinstance(value, signal.Signals):
            leave_after(_COLLECT_S, 128 + value)
        return value
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # the launcher waits for a value or a failure
            return None
        fail(error, int(os.environ["RANK"]), Path(folder))
