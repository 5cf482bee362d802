"""How a worker's failure reaches the user: each writes a file, and the launcher picks the first cause."""

import hashlib
import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from lockstep.errors import EXIT_FAILURE, EXIT_HANG, EXIT_INTERRUPTED, EXIT_USER_ERROR, PeerError, UserError
from lockstep.processes.files import atomic_write
from lockstep.processes.signals import exit_now, stop_requested

FAILURES = "LOCKSTEP_FAILURES"  # the environment variable that names the folder of the files
SHUTDOWN_S = 5  # what a worker gets to close its journal
_SIGNALLED = (128 + 15, 128 + 1)  # SystemExit by SIGTERM and by SIGHUP


class WorkerFailed(Exception):
    """A worker failed; carries the first failure's own message and traceback (empty for a UserError)."""

    def __init__(self, rank: int, message: str, exit_code: int, trace: str = "", transient: bool = False) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.transient = transient  # killed or hung: the same again may well work
        self.rank, self.message, self.exit_code, self.trace = rank, message, exit_code, trace
        if trace:
            self.add_note(f"The traceback of rank {rank}:\n{trace}")


def exit_with_failure(error: BaseException, rank: int, folder: Path) -> NoReturn:
    """End this worker; a file in `folder` has the reason, for the launcher."""
    lost = isinstance(error, PeerError) or is_peer_loss(error)
    message, trace, code = last_line(error), "", EXIT_FAILURE
    asked_to = isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in _SIGNALLED)
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
    failure = {"rank": rank, "message": message, "code": code, "trace": trace, "time_ns": time.time_ns()}
    failure["cause"] = not lost and not asked_to
    try:
        with atomic_write(folder / f"failure-{rank}.json", durable=False) as part:
            part.write_text(json.dumps(failure), encoding="utf-8")
        if lost and not other_failure(folder) and not stop_requested.is_set():
            time.sleep(SHUTDOWN_S)  # the launcher must see the rank that failed go first; it ends this one meanwhile
    finally:
        exit_now(code)


def other_failure(folder: Path) -> PeerError | None:
    """The failure that a rank of this machine left, for those that stop because of it."""
    failures = [failure for failure in _failures(folder) if failure["cause"]]
    return PeerError(f"rank {failures[0]['rank']}: {failures[0]['message']}") if failures else None


def _failures(folder: Path) -> list[dict[str, Any]]:
    """What failed ranks left, by the clock; those that lost another rank or were asked to stop come last."""
    failures = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failure-*.json")]
    return sorted(failures, key=lambda failure: (not failure["cause"], failure["time_ns"]))


def last_line(error: BaseException) -> str:
    """An exception as the last line of its traceback: type and message."""
    return traceback.format_exception_only(error)[-1].strip()


def is_peer_loss(error: BaseException) -> bool:
    """True for what a collective raises when the rank at the other end is gone or silent."""
    import torch.distributed as dist

    signs = ("closed by peer", "reset by peer", "Broken pipe", "imed out", "remote process exited")  # gloo's and NCCL's
    return isinstance(error, (PeerError, dist.DistNetworkError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def first_failure(folder: Path, failed: Any) -> WorkerFailed:
    """The failure to report: the first by the clock of those that did not just lose another rank."""
    failures = _failures(folder)
    rank, first_ended = failed.get_first_failure()
    code = first_ended.exitcode
    if code < 0 and not any(failure["rank"] == rank for failure in failures):
        hint = " (often the kernel, out of memory: try a smaller --batch-size or --accumulate)" if code == -9 else ""
        return WorkerFailed(rank, f"killed by {signal.Signals(-code).name}{hint}", EXIT_FAILURE, transient=True)
    hung = any(f.exitcode == EXIT_HANG for f in failed.failures.values())
    if failures and not hung:
        first = failures[0]
        return WorkerFailed(first["rank"], first["message"], first["code"], first["trace"], not first["cause"])
    if hung:
        return WorkerFailed(rank, "no progress for --hang-timeout; the report is above", EXIT_HANG, transient=True)
    return WorkerFailed(rank, f"ended with exit code {code}", code)


def reported_already(message: str) -> bool:
    """True where another rank was quicker to report the same error; the first one asked gets False."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return int(os.environ["LOCAL_RANK"]) > 0
    key = hashlib.sha256(message.encode()).hexdigest()
    try:
        return bool(dist.distributed_c10d._get_default_store().add(f"lockstep/reported/{key}", 1) > 1)
    except (dist.DistError, RuntimeError):  # the store went with the rank that kept it: better twice than never
        return False
