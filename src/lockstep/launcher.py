"""Start workers on this machine through torch's elastic launcher, or join those that a launcher started."""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config import Execution
from lockstep.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, PeerError, UserError

_MAX_AUTO = 8  # beyond that a laptop-sized job loses to start-up and all-reduce; ask for more by number
_SHUTDOWN_S = 5  # what a worker gets to close its journal


class WorkerFailed(Exception):
    """A worker failed; carries the first failure's own message and traceback."""

    def __init__(self, rank: int, message: str, exit_code: int, trace: str = "") -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank, self.message, self.exit_code, self.trace = rank, message, exit_code, trace


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

    Under torchrun, which has started the processes already, each runs `fn` itself and the list holds its own value. A single
    process runs it here. Otherwise workers are spawned: `fn` and `args` must be picklable and the call stand under
    `if __name__ == "__main__":`, as for torch.multiprocessing.spawn.

    Raises:
        UserError: for a request that this machine can't meet.
        WorkerFailed: where a worker failed, with the first failure's message.
        KeyboardInterrupt: on Ctrl-C, when all workers are gone.
    """
    import dataclasses
    import multiprocessing

    from lockstep.world import join, joined

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
        with join(execution) as world:
            return [fn(world, *args)]
    count = processes(execution)
    if count == 1 and execution.nnodes == 1:
        with join(execution) as world:
            return [fn(world, *args)]
    return _start(fn, args, execution, count)


def _start(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution, count: int) -> list[Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # they tell of failures in their own words
        logging.getLogger(name).setLevel(logging.CRITICAL)
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
        )
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # keep the launcher quiet; join() sets the threads
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_SHUTDOWN_S)
        try:
            values = elastic_launch(launcher, _worker)(fn, args, execution, folder, os.getpid())
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


def _worker(fn: Callable[..., Any], args: tuple[Any, ...], execution: Execution, folder: str, parent: int) -> Any:
    """What a spawned process runs: join, call, and leave word where it fails."""
    _die_with(parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from lockstep.world import join

    rank = int(os.environ["RANK"])
    try:
        with join(execution) as world:
            return fn(world, *args)
    except UserError as error:
        code, word = EXIT_USER_ERROR, {"message": str(error), "trace": ""}
    except KeyboardInterrupt:
        os._exit(EXIT_INTERRUPTED)  # without waiting for collectives that nobody will finish
    except PeerError:
        time.sleep(_SHUTDOWN_S)  # the failing rank's end is the one to report; the launcher ends this process meanwhile
        os._exit(EXIT_FAILURE)
    except Exception as error:
        last_line = traceback.format_exception_only(error)[-1].strip()
        code, word = EXIT_FAILURE, {"message": last_line, "trace": traceback.format_exc()}
        if _is_peer_loss(error):
            word["peer"] = "yes"
    word_file = Path(folder, f"failure-{rank}.json")
    part = word_file.with_suffix(".part")
    part.write_text(json.dumps({**word, "rank": rank, "code": code, "time_ns": time.time_ns()}))
    part.rename(word_file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_peer_loss(error: Exception) -> bool:
    """True for what a collective raises when the rank at the other end is gone."""
    import torch.distributed as dist

    text = str(error)
    return isinstance(error, dist.DistError) or any(
        sign in text for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")
    )


def _first_failure(folder: Path, failed: Any) -> Exception:
    """The failure that came first by the clock, those that only lost their peer last."""
    words = [json.loads(path.read_text()) for path in folder.glob("failure-*.json")]
    rank, failure = failed.get_first_failure()
    silent = {f.local_rank for f in failed.failures.values()} - {w["rank"] for w in words}
    if words and not (all("peer" in w for w in words) and silent):
        first = min(words, key=lambda w: ("peer" in w, w["time_ns"]))
        return WorkerFailed(first["rank"], first["message"], first["code"], first["trace"])
    code = failure.exitcode
    cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    hint = " (often the kernel, out of memory: try a smaller --batch-size or --accumulate)" if code == -9 else ""
    return WorkerFailed(rank, cause + hint, EXIT_FAILURE)


def _die_with(parent: int) -> None:
    """Ask Linux to end this process when its launcher dies, however it dies."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    with suppress(OSError):
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was made
        os._exit(EXIT_FAILURE)
