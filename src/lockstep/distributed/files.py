"""Files that are whole or not there, the error where the system refuses, and the lock of a run folder."""

import fcntl
import json
import math
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from lockstep.distributed.proc import alive
from lockstep.errors import UserError, is_url, refusal

_encode = json.JSONEncoder(allow_nan=False).encode
_REMEDY = (
    "Free some space there, raise the quota or `ulimit -f`, give this user the right to write, or mount it again if it "
    "was removed, renamed or unmounted, or is read-only. Or continue in another folder."
)
_ONE_SLASH = re.compile(r"(s3a?|gc?s|az|abfss?|hdfs|https?|file):/(?!/)", re.IGNORECASE)  # in front of what is no path


def require_local(text: str, flag: str = "") -> None:
    """Raise UserError for an address, as s3://bucket/run, where a path is wanted. `flag`: the one that wants it."""
    if _ONE_SLASH.match(text):
        what = f"{flag} {text}: an address has two slashes behind its first colon".strip()
        raise UserError(what, f"Write both; a folder of this machine that is called so is ./{text}.")
    if is_url(text):
        raise UserError(
            f"{flag} {text} is an address, and what is read and written here are files of this machine".strip(),
            "Mount that storage, or copy what it holds, and give the path. A set of the Hugging Face hub is hf:NAME.",
        )


def named(text: str) -> Path:
    """The path that a user wrote, which may not exist; ~ is a home. Raises UserError for what can't be looked up."""
    require_local(text)
    try:
        path = Path(text).expanduser()
        path.exists()  # raises for a name that is too long, and behind a folder that is closed to this user
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such user's home
        raise UserError(f"{text} can't be looked up: {refusal(error)}", "Is it the path that was meant?") from error
    return path


def new_file(text: str, flag: str) -> Path:
    """The path of a file that is to be made, looked at before the work. Raises UserError where it is there, or its
    folder is not; `flag` names it."""
    path = named(text)
    if os.path.lexists(path):
        raise UserError(f"{path} exists already", f"Name another file with {flag}, or remove that one.")
    require_folder(path)
    return path


def require_folder(path: Path) -> None:
    """Raise UserError where a file that is to be written would have no folder; looked at before the work."""
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} into", "Make it, or name another one.")


def fsync(path: Path) -> None:
    """Have the system put a file's or folder's content on the device before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path, durable: bool = True) -> Iterator[Path]:
    """The path of a temporary file to write inside; at the end it becomes `path`, whole, or nothing does.

    `durable`: also when the machine dies, which waits for the device. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if durable:
            fsync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        fsync(path.parent)


def remove_half_written(folder: Path) -> None:
    """Remove what killed processes were writing there by `atomic_write` or safetensors; for the one that writes now."""
    for left in [*folder.glob(".*.tmp"), *folder.glob(".tmp*")]:
        left.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """As `atomic_write`, durable; raises UserError where the system refuses."""
    with writing(path), atomic_write(path) as temporary:
        yield temporary


def write_text(path: Path, text: str) -> None:
    """Write a text file that is whole or not there. Raises UserError where the system refuses."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Any) -> None:
    """Write values as a JSON file, likewise."""
    write_text(path, json.dumps(finite(values), indent=2, allow_nan=False) + "\n")


def to_json(value: Any) -> str:
    """The value on one line; numbers that JSON has not are strings (see `finite`)."""
    try:
        return _encode(value)
    except ValueError:  # looking for them beforehand would cost more than the rest
        return _encode(finite(value))


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def write_error(path: Path, error: Exception, what: str = "") -> UserError:
    """The error for a write below `path` that the system refused: what, where, the system's reason, what to do."""
    return UserError(f"can't write {what}{path}: {refusal(error)}", _REMEDY)


@contextmanager
def writing(path: Path, what: str = "") -> Iterator[None]:
    """Raises that error where the system refuses what is done inside."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error, what) from error


LOCK = "run.lock"
_POLL_S = 0.05
_LOOKS = 20  # until who has the lock has written its name: as a rule microseconds
_ORPHANS_S = 10.0  # that the ranks of a killed launcher may take to end, on a busy machine


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process inside; its lock file is there only meanwhile, or after a kill.

    The kernel lets the lock go when its holder ends, however that is. A file system without locks (NFS without a lock
    service) can't tell: then the folder is not held. Raises UserError where a run holds it already, naming that.
    """
    path = folder / LOCK
    with writing(path):
        descriptor = _lock(path)
    try:
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": began})
        with suppress(OSError):  # a full disk: the lock itself needs no room
            os.truncate(descriptor, 0)
            os.write(descriptor, holder.encode())
        yield
    finally:
        if _is(path, descriptor):
            path.unlink()  # while it is held: who opens it now and gets the lock finds that it is gone
        os.close(descriptor)


def writer(folder: Path) -> Literal["none", "here", "elsewhere", "killed"]:
    """Whether a run's process holds the folder, without touching the lock: it has none; one that lives on this machine;
    one that may live on another; or one of this machine that is gone and left its lock behind."""
    path = folder / LOCK
    if not (found := _read(path)):
        return "elsewhere" if path.is_file() else "none"
    if found["host"] != socket.gethostname():
        return "elsewhere"
    return "here" if alive(found["pid"]) else "killed"


def _lock(path: Path) -> int:
    """The descriptor of the lock file, locked. Raises UserError where another process has the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        # who was killed may have ranks on their way out, which still have the lock
        if not try_lock(descriptor) and not (writer(path.parent) == "killed" and try_lock(descriptor, _ORPHANS_S)):
            os.close(descriptor)
            found = _read(path)
            who = f": process {found['pid']} on {found['host']}, since {found['since']}" if found else ""
            raise UserError(
                f"{path.parent} is in use by another run{who}",
                "Wait until that has ended, or name another folder with --out.",
            )
        if _is(path, descriptor):
            return descriptor
        os.close(descriptor)  # it was unlinked by who held it before


def _is(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one at the path."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


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


def _read(path: Path) -> dict[str, Any]:
    """What the holder wrote, awaited where it is just about to; nothing where it could not."""
    for _ in range(_LOOKS):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return {"host": found["host"], "pid": int(found["pid"]), "since": found["since"]}
        except OSError:
            return {}
        except (ValueError, KeyError, TypeError):
            time.sleep(_POLL_S)
    return {}


@contextmanager
def temporary_folder(purpose: str = "") -> Iterator[str]:
    """A folder of mode 0700 that is gone at the end. Raises UserError where there is no place for one."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix=f"lockstep-{purpose}", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"there is no place for temporary files: {refusal(error)}", "Name one by TMPDIR.") from error
    with temporary as folder:
        yield folder
