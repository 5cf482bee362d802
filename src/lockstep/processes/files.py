"""Writing files that are whole or not there, and the error where the system refuses."""

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, refusal

_encode = json.JSONEncoder(allow_nan=False).encode
_ROOM = "Free some space there (or raise the quota), keep fewer checkpoints, or continue in another folder."
_RIGHTS = "Give this user the right to write there, or continue in another folder."
_GONE = "It was removed, renamed or unmounted while in use: bring it back, or continue in another folder."
_REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: "That file system is read-only: remount it, or continue in another folder.",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.ESTALE: _GONE,
    errno.EIO: "The device reports a fault: look at the system log, and continue on another disk.",
}


def named(text: str) -> Path:
    """The path that a user wrote, which may not exist; ~ is a home. Raises UserError where it can't be looked up."""
    try:
        path = Path(text).expanduser()
        path.exists()  # raises for a name that is too long, and behind a folder that is closed to this user
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such user's home
        raise UserError(f"{text} can't be looked up: {refusal(error)}", "Is it the path that was meant?") from error
    return path


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


def write_text(path: Path, text: str) -> None:
    """Write a text file that is whole or not there. Raises UserError where the system refuses."""
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(path, error) from error


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
    remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "Is its folder there, yours, and not full?")
    return UserError(f"can't write {what}{path}: {refusal(error)}", remedy)
