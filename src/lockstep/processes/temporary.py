"""Folders of temporary files, of mode 0700. Who is killed leaves one behind, and the next start clears it away."""

import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.errors import UserError
from lockstep.processes.lock import try_lock

_PREFIX = "lockstep-"
_OURS = re.compile(_PREFIX + r"(verify-|chaos-)?\w{8}")
_YOUNG_S = 60.0  # made, and perhaps not locked yet


@contextmanager
def temporary_folder(purpose: str = "") -> Iterator[str]:
    """A folder that is gone at the end; locked meanwhile, so that others know it to be in use.

    Raises:
        UserError: where there is no place for one.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{purpose}", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"there is no place for temporary files: {error.strerror}", "Name one by TMPDIR.") from error
    with made as folder:
        _sweep(Path(folder).parent)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try_lock(descriptor)
            yield folder
        finally:
            os.close(descriptor)


def _sweep(place: Path) -> None:
    """Remove what this user's processes that were killed left there: folders of ours that nobody has locked."""
    with suppress(OSError):
        for entry in os.scandir(place):
            if _OURS.fullmatch(entry.name):
                with suppress(OSError):  # it went meanwhile
                    _remove_if_left(Path(entry.path))


def _remove_if_left(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        ours = found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
        if ours and time.time() - found.st_mtime > _YOUNG_S and try_lock(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
