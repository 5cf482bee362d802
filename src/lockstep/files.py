"""Writing to disk: digests on the way, synced, removed whole, and explained where it fails."""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError

CHUNK = 4 << 20  # bytes hashed and written at a time: both release the interpreter, so training goes on beside them

HIDDEN = re.compile(r"\.(?P<why>writing|removing|replaced)-[0-9a-f]{8}-(?P<name>step-\d+)")

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


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


def fsync(path: Path) -> None:
    """Have the system put a file's or folder's content on the device before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and have it on the device. Raises OSError, also where there is a file of this name."""
    sha, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), CHUNK):
                chunk = view[start : start + CHUNK]
                file.write(chunk)
                sha.update(chunk)
            size += len(view)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, sha.hexdigest())


def write_error(path: Path, error: OSError, what: str = "") -> UserError:
    """The error for a write below `path` that the system refused: what it is, where, the system's words, the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "Is its folder there, yours, and not full?")
    return UserError(f"can't write {what}{path}: {error.strerror or error}", remedy)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no moment shows half of it under its name.

    Raises:
        OSError: where it can't even be renamed. What is left of the content lies under a name that means nothing.
    """
    hidden = folder if folder.name.startswith(".removing-") else hide(folder, "removing")
    with suppress(FileNotFoundError):
        shutil.rmtree(hidden)


def hide(folder: Path, why: str) -> Path:
    """Rename a folder to `.WHY-RANDOM-NAME`, and return that path. One that is hidden already keeps its NAME."""
    match = HIDDEN.fullmatch(folder.name)
    return folder.rename(folder.with_name(f".{why}-{os.urandom(4).hex()}-{match['name'] if match else folder.name}"))
