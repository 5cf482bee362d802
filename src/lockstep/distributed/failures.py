"""How a rank's failure reaches the user: each reports its own to the launcher, and that picks the first cause."""

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from lockstep.errors import EXIT_FAILURE, EXIT_HANG, EXIT_USER_ERROR, PeerError, StoppedBySignal, UserError, shown

SHUTDOWN_S = 5  # what a rank gets to close its journal
# what libraries and the system say where a limit is reached, of threads and processes, of files, of memory
_LIMITS = (
    *("can't start new thread", "Resource temporarily unavailable", "Too many open files"),
    *("annot allocate memory", "can't allocate memory", "failed to map segment"),
)
_AT_A_LIMIT = (
    "Look at `ulimit -u`, `ulimit -n`, `ulimit -v` and the container's memory and pids limit, or use fewer: --nproc, "
    "--threads, --workers. A smaller --batch-size takes less memory, and so does --accumulate."
)


@dataclass(eq=False)
class WorkerFailed(Exception):
    """A rank failed: what it reported itself, or what its launcher found."""

    rank: int
    message: str
    exit_code: int
    trace: str = ""  # its traceback; empty for a UserError
    transient: bool = False  # it was killed or hung, or only lost another rank: the same again may well work
    lost: bool = False  # it only lost another rank, which is no cause

    def __post_init__(self) -> None:
        if self.trace:
            self.add_note(f"The traceback of rank {self.rank}:\n{self.trace}")

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


def failure_of(error: BaseException, rank: int) -> WorkerFailed | None:
    """What a rank reports of the exception that ended it; None for SystemExit(0). Pickle takes what is positional."""
    message = last_line(error)
    if isinstance(error, PeerError) or is_peer_loss(error):
        return WorkerFailed(rank, f"lost another rank: {message}", EXIT_FAILURE, transient=True, lost=True)
    if user_error := error if isinstance(error, UserError) else at_a_limit(error):
        return WorkerFailed(rank, f"{user_error}{called_at(error)}", EXIT_USER_ERROR)
    if isinstance(error, KeyboardInterrupt | StoppedBySignal):
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.Signals(error.code - 128)
        return WorkerFailed(rank, f"ended by {number.name}", 128 + number, "", True)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILURE
        return WorkerFailed(rank, message, code) if error.code else None
    return WorkerFailed(rank, message, EXIT_FAILURE, "".join(traceback.format_exception(error)))


def called_at(error: BaseException) -> str:
    """The user's own line that an error comes from, as a line to follow its message; "" where no such line is."""
    libraries = Path(__file__).parents[1], Path(os.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        own = not any(path.is_relative_to(folder) for folder in libraries) and "site-packages" not in path.parts
        if own and path.is_file():
            return f"\n  called at {path}:{frame.lineno}: {frame.line}"
    return ""


def shorten_uncaught() -> None:
    """From here on a script that ends by an error of Lockstep's prints what it says, without the launcher's traceback.

    Other errors, and a hook that somebody has set, stay as they are.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_uncaught


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, (UserError, WorkerFailed, PeerError)):
        sys.__excepthook__(kind, error, trace)
        return
    rank_trace, called = (error.trace, "") if isinstance(error, WorkerFailed) else ("", called_at(error))
    print(shown(f"{rank_trace}lockstep: {error}{called}", keep="\n"), file=sys.stderr, flush=True)


def send_failure(pipe: Connection, error: BaseException, rank: int) -> int:
    """Report an exception to the launcher; returns the exit code that goes with it."""
    failure = failure_of(error, rank)
    with suppress(OSError):  # nobody is left to hear it
        pipe.send_bytes(pickle.dumps(failure))
    return failure.exit_code if failure else 0


def at_a_limit(error: BaseException) -> UserError | None:
    """The error for an exception that means a limit of the system, with the place that met it; None for any other."""
    if not isinstance(error, (OSError, RuntimeError, ImportError, MemoryError)):
        return None
    text = "can't allocate memory" if isinstance(error, MemoryError) else str(error)
    if "device-side assert" in text:
        remedy = "Most often it is a label out of range, or fewer outputs than classes: --device cpu names it."
        return UserError("the GPU stopped where an index was out of range", remedy)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    limit = any(sign in text for sign in _LIMITS)
    return UserError(f"{text.partition(chr(10))[0]}{place}", _AT_A_LIMIT) if limit else None


def last_line(error: BaseException) -> str:
    """An exception as the last line of its traceback, before notes: type and message."""
    shown = traceback.TracebackException.from_exception(error)
    shown.__notes__ = []
    return [*shown.format_exception_only()][-1].strip()


def how_it_ended(code: int | None) -> str:
    """The end of a process, in words; None: not known."""
    if code is None:
        return "is gone"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def is_peer_gone(error: BaseException) -> bool:
    """True for what torch raises when the process at the other end of a connection has ended."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")  # gloo's and NCCL's
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def is_peer_loss(error: BaseException) -> bool:
    """True for what a collective raises when the rank at the other end is gone or silent."""
    import torch.distributed as dist

    silent = isinstance(error, RuntimeError) and "imed out" in str(error)
    return isinstance(error, (PeerError, dist.DistNetworkError)) or silent or is_peer_gone(error)


def first_failure(
    ended: Mapping[int, int], failures: Sequence[WorkerFailed], returned: Collection[int] = ()
) -> WorkerFailed:
    """The failure to report: a rank was killed, hung, ended without a word, had a reason, or else lost another one.

    `ended`: rank -> exit code, in the order of their ends, of those that nobody had asked to stop. `returned`: ranks
    that returned a value.
    """
    spoke = {*returned, *(failure.rank for failure in failures)}
    silent = {rank: code for rank, code in ended.items() if rank not in spoke}
    for rank, code in silent.items():
        if code < 0:
            hint = " (often the kernel, out of memory: a smaller --batch-size or --accumulate)" if code == -9 else ""
            return WorkerFailed(rank, f"killed by {signal.Signals(-code).name}{hint}", EXIT_FAILURE, transient=True)
    if hung := [rank for rank, code in ended.items() if code == EXIT_HANG]:
        return WorkerFailed(hung[0], "no progress for --hang-timeout; the report is above", EXIT_HANG, transient=True)
    if silent:
        rank, code = next(iter(silent.items()))
        text = f"its process ended with exit code {code} and no error, as by os._exit() or in C code"
        return WorkerFailed(rank, text, code or EXIT_FAILURE)
    # who was ended is heard before or after who lost that one; a copy: to raise it makes a circle
    return replace(min(failures, key=lambda failure: (failure.transient, failure.lost)))


def reported_already(message: str) -> bool:
    """True where another rank was quicker to report the same error; the first one that asks gets False."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return int(os.environ["LOCAL_RANK"]) > 0
    try:
        return bool(dist.distributed_c10d._get_default_store().add(f"lockstep/reported/{message}", 1) > 1)
    except (dist.DistError, RuntimeError):  # the store went with the rank that kept it: better twice than never
        return False
