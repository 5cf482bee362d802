"""One writer a folder: a lock that the kernel lets go of when the process that holds it ends, however that is."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from lockstep.errors import UserError
from lockstep.processes.files import write_error

LOCK = "run.lock"
_POLL_S = 0.05
_NAMED_S = 1.0  # from having the lock to having written who has it: as a rule microseconds
_ORPHANS_S = 10.0  # that the workers of a killed launcher may take to end, on a busy machine


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process inside; its lock file is there only meanwhile, or after a kill.

    A file system without locks (NFS without a lock service) can't tell: then it is not held.

    Raises:
        UserError: where a run holds it already, naming the host, the process and since when; or it can't be written.
    """
    path = folder / LOCK
    try:
        descriptor = _locked_file(path)
    except OSError as error:
        raise write_error(path, error) from error
    if descriptor is None:
        raise UserError(
            f"{folder} is in use by another run{_holder(path)}",
            "Wait until that has ended, or name another folder with --out.",
        )
    try:
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": began})
        with suppress(OSError):  # a full disk: the lock itself needs no room
            os.truncate(descriptor, 0)
            os.write(descriptor, holder.encode())
        yield
    finally:
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                path.unlink()  # while it is held: who opens it now and gets the lock finds that it is gone
        os.close(descriptor)


def writer(folder: Path) -> Literal["none", "here", "elsewhere", "killed"]:
    """Whether a run's process holds the folder, without touching the lock: it has none; one that lives on this machine;
    one that may live on another; or one of this machine that is gone and left its lock behind."""
    path = folder / LOCK
    if not path.is_file():
        return "none"
    found = _read(path)
    if found.get("host") != socket.gethostname():
        return "elsewhere"
    return "killed" if _killed(path) else "here"


def _locked_file(path: Path) -> int | None:
    """The descriptor of the lock file, locked; None where another process has the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        if not try_lock(descriptor) and not (_killed(path) and try_lock(descriptor, _ORPHANS_S)):
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # it was unlinked by who held it before


def try_lock(descriptor: int, seconds: float = 0.0) -> bool:
    """Lock an open file for this process; False where another one holds it for so many seconds more."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks
            return True


def _holder(path: Path) -> str:
    until = time.monotonic() + _NAMED_S
    while not (found := _read(path)) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return f": process {found['pid']} on {found['host']}, since {found['since']}" if found else ""


def _killed(path: Path) -> bool:
    """True where who wrote the lock file has died on this machine: its workers, on their way out, have the lock yet."""
    found = _read(path)
    if not found or found["host"] != socket.gethostname():
        return False
    try:
        return psutil.Process(found["pid"]).status() == psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, TypeError, ValueError):  # the latter two: the file was written by somebody else
        return True


def _read(path: Path) -> dict[str, Any]:
    """What the holder wrote; nothing where it is just about to."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: found[name] for name in ("pid", "host", "since")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
