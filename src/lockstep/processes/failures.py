"""How a worker's failure reaches the user: each tells the launcher its own, and that picks the first cause."""

import hashlib
import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import EXIT_FAILURE, EXIT_HANG, EXIT_INTERRUPTED, EXIT_USER_ERROR, PeerError, UserError

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


@dataclass(frozen=True)
class Failure:
    """A worker's own word of why it ends."""

    rank: int
    message: str
    code: int  # which the process ends with
    trace: str = ""
    cause: bool = True  # False where it only lost another rank, or was asked to stop


def failure_of(error: BaseException, rank: int) -> Failure | None:
    """What a worker says of the exception that ended it; None for SystemExit(0)."""
    message = last_line(error)
    if isinstance(error, PeerError) or is_peer_loss(error):
        return Failure(rank, f"lost another rank: {message}", EXIT_FAILURE, cause=False)
    if isinstance(error, UserError):
        return Failure(rank, str(error), EXIT_USER_ERROR)
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, message, EXIT_INTERRUPTED, cause=False)
    if isinstance(error, SystemExit):
        if not error.code:
            return None
        code = error.code if isinstance(error.code, int) else EXIT_FAILURE
        if code in _SIGNALLED:
            return Failure(rank, f"ended by {signal.Signals(code - 128).name}", code, cause=False)
        return Failure(rank, message, code)
    return Failure(rank, message, EXIT_FAILURE, "".join(traceback.format_exception(error)))


def last_line(error: BaseException) -> str:
    """An exception as the last line of its traceback: type and message."""
    return traceback.format_exception_only(error)[-1].strip()


def is_peer_gone(error: BaseException) -> bool:
    """True for what torch raises when the process at the other end of a connection has ended."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")  # gloo's and NCCL's
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def is_peer_loss(error: BaseException) -> bool:
    """True for what a collective raises when the rank at the other end is gone or silent."""
    import torch.distributed as dist

    silent = isinstance(error, RuntimeError) and "imed out" in str(error)
    return isinstance(error, (PeerError, dist.DistNetworkError)) or silent or is_peer_gone(error)


def first_failure(ended: Mapping[int, int], told: Sequence[Failure]) -> WorkerFailed:
    """The failure to report: who was killed, hung or had a reason of its own, before those that lost another rank.

    Args:
        ended: rank -> exit code, in the order of their ends, of those that nobody had asked to stop.
        told: what workers said, in their order.
    """
    spoke = {failure.rank for failure in told}
    for rank, code in ended.items():
        if code < 0 and rank not in spoke:
            hint = (
                " (often the kernel, out of memory: try a smaller --batch-size or --accumulate)" if code == -9 else ""
            )
            return WorkerFailed(rank, f"killed by {signal.Signals(-code).name}{hint}", EXIT_FAILURE, transient=True)
    if hung := [rank for rank, code in ended.items() if code == EXIT_HANG]:
        return WorkerFailed(hung[0], "no progress for --hang-timeout; the report is above", EXIT_HANG, transient=True)
    if failures := sorted(told, key=lambda failure: not failure.cause):
        first = failures[0]
        return WorkerFailed(first.rank, first.message, first.code, first.trace, transient=not first.cause)
    rank, code = next((rank, code) for rank, code in ended.items() if code)
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
