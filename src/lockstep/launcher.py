"""Start workers on this machine through torch's elastic launcher, or join those that a launcher started."""

import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lockstep.config import Execution
from lockstep.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, PeerError, UserError
from lockstep.lifetime import (
    children_deaf_to_interrupts,
    end_with_parent,
    ended_by_sigterm,
    heeded,
    leave,
    stop_in_time,
)

_MAX_AUTO = 8  # beyond that a laptop-sized job loses to start-up and all-reduce; ask for more by number
_SHUTDOWN_S = 5  # what a worker gets to close its journal


class WorkerFailed(Exception):
    """A worker failed; carries the first failure's own message and traceback (empty for a UserError)."""

    def __init__(self, rank: int, message: str, exit_code: int, trace: str = "") -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank, self.message, self.exit_code, self.trace = rank, message, exit_code, trace
        if trace:
            self.add_note(f"The traceback of rank {rank}:\n{trace}")


def processes(execution: Execution) -> int:
    """Processes to start on this machine: --nproc, or one per GPU, or one per core (at most 8)."""
    from lockstep.world import cores, devices

    available = devices(execution)
    on_cpu = available[0].type == "cpu"
    if execution.strategy in ("single", "dp"):
        return 1
    if execution.nproc == "auto":
        return min(cores(), _MAX_AUTO) if on_cpu else len(available)
    if not on_cpu and execution.nproc > len(available) and execution.backend != "gloo":
        raise UserError(
            f"--nproc {execution.nproc} needs {execution.nproc} GPUs, this machine offers {len(available)}",
            f"Use --nproc {len(available)} (NCCL takes one process per GPU) or --device cpu.",
        )
    return execution.nproc


def launch(
    fn: Callable[..., Any], *args: Any, nproc: int | str = "auto", execution: Execution | None = None
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
    from lockstep.world import joined

    if execution is None:
        execution = Execution(nproc=nproc)  # type: ignore[arg-type]
    elif nproc != "auto":
        execution = dataclasses.replace(execution, nproc=nproc)  # type: ignore[arg-type]
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "launch() was reached again while a worker imported the main script",
            'Put the call under `if __name__ == "__main__":`.',
        )
    if joined():
        return [_joined(fn, args, execution)]
    count = processes(execution)
    if count == 1 and execution.nnodes == 1:
        return [_here(fn, args, execution)]
    return _start(fn, args, execution, count)


def _here(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution) -> Any:
    from lockstep.world import join

    with ended_by_sigterm(), join(execution) as world:
        return fn(world, *args)


def _joined(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution) -> Any:
    """Run `fn` as one of the processes that another launcher started."""
    rank = int(os.environ["RANK"])
    try:
        return _here(fn, args, execution)
    except UserError as error:
        if _said_already(str(error)):
            raise SystemExit(EXIT_USER_ERROR) from error
        raise WorkerFailed(rank, str(error), EXIT_USER_ERROR) from error
    except Exception as error:
        if not _is_peer_loss(error):
            raise
        time.sleep(_SHUTDOWN_S)  # the launcher must see the rank that failed go first; it ends this process meanwhile
        raise PeerError(f"rank {rank} lost another rank: {_last_line(error)}") from error


def _said_already(message: str) -> bool:
    """True where another rank was quicker to report the same error; the first one asked gets False."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return int(os.environ["LOCAL_RANK"]) > 0
    key = hashlib.sha256(message.encode()).hexdigest()
    try:
        return bool(dist.distributed_c10d._get_default_store().add(f"lockstep/said/{key}", 1) > 1)
    except (dist.DistError, RuntimeError):  # the store went with the rank that kept it: better twice than never
        return False


def _start(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution, count: int) -> list[Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they tell of failures too, in a page of their own
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        launcher = LaunchConfig(
            min_nodes=execution.nnodes,
            max_nodes=execution.nnodes,
            nproc_per_node=count,
            run_id="lockstep",
            rdzv_backend="c10d" if execution.nnodes == 1 else "static",
            rdzv_endpoint=_endpoint(execution),
            rdzv_configs={"rank": execution.node_rank, "timeout": int(execution.timeout)}
            if execution.nnodes > 1
            else {"is_host": True},
            max_restarts=0,
            local_addr="localhost" if execution.nnodes == 1 else None,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=heeded(),
        )
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # keep the launcher quiet; join() sets the threads
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(2 * _SHUTDOWN_S)  # workers end themselves before
        try:
            with children_deaf_to_interrupts():
                values = elastic_launch(launcher, _worker)(fn, args, execution, folder)
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
        except ChildFailedError as failed:
            raise _first_failure(Path(folder), failed) from None
    return [values[rank] for rank in sorted(values)]


def _endpoint(execution: Execution) -> str:
    """Where the processes meet; for one machine a free port, or the one asked for if it is free."""
    if execution.nnodes > 1:
        return f"{execution.master_addr}:{execution.master_port}"
    if execution.master_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("localhost", execution.master_port))
            except OSError as error:
                raise UserError(
                    f"--master-port {execution.master_port} is in use on this machine",
                    "Leave the flag out and a free port is found, or name another.",
                ) from error
    return f"localhost:{execution.master_port}"


def _worker(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution, folder: str) -> Any:
    """What a spawned process runs: join, call, and leave word where it fails."""
    try:
        end_with_parent()
        stop_in_time(_SHUTDOWN_S, lambda: _other_failure(Path(folder)))
        from lockstep.world import join

        with join(execution) as world:
            return fn(world, *args)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # the launcher waits for a value or a failure
            return None
        _fail(error, int(os.environ["RANK"]), Path(folder))


def _fail(error: BaseException, rank: int, folder: Path) -> NoReturn:
    """End this worker; a file in `folder` tells the launcher why."""
    lost = isinstance(error, PeerError) or _is_peer_loss(error)
    message, trace, code = _last_line(error), "", EXIT_FAILURE
    if lost:
        message = f"lost another rank: {message}"
    elif isinstance(error, UserError):
        message, code = str(error), EXIT_USER_ERROR
    elif isinstance(error, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILURE
    else:
        trace = "".join(traceback.format_exception(error))
    word = {"rank": rank, "message": message, "code": code, "trace": trace, "lost": lost, "time_ns": time.time_ns()}
    part = folder / f"failure-{rank}.part"
    part.write_text(json.dumps(word), encoding="utf-8")
    part.rename(part.with_suffix(".json"))
    try:
        if lost and not _other_failure(folder):
            time.sleep(_SHUTDOWN_S)  # the launcher must see the rank that failed go first; it ends this one meanwhile
    finally:
        leave(code)


def _other_failure(folder: Path) -> PeerError | None:
    """The failure that a rank of this machine left word of, for those that stop because of it."""
    words = [word for word in _words(folder) if not word["lost"]]
    return PeerError(f"rank {words[0]['rank']}: {words[0]['message']}") if words else None


def _words(folder: Path) -> list[dict[str, Any]]:
    """What failed ranks left, those that just lost another rank last, else by the clock."""
    words = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failure-*.json")]
    return sorted(words, key=lambda word: (word["lost"], word["time_ns"]))


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _is_peer_loss(error: BaseException) -> bool:
    """True for what a collective raises when the rank at the other end is gone or silent."""
    import torch.distributed as dist

    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")
    return isinstance(error, (PeerError, dist.DistError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def _first_failure(folder: Path, failed: Any) -> WorkerFailed:
    """The failure to tell of: the first by the clock of those that did not just lose another rank."""
    words = _words(folder)
    rank, failure = failed.get_first_failure()
    code = failure.exitcode
    if code < 0 and not any(word["rank"] == rank for word in words):
        hint = " (often the kernel, out of memory: try a smaller --batch-size or --accumulate)" if code == -9 else ""
        return WorkerFailed(rank, f"killed by {signal.Signals(-code).name}{hint}", EXIT_FAILURE)
    if words:
        first = words[0]
        return WorkerFailed(first["rank"], first["message"], first["code"], first["trace"])
    return WorkerFailed(rank, f"ended with exit code {code}", code)
