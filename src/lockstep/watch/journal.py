"""The run's journal: one JSON object a line (records.py), written by rank 0, flushed at once."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TextIO, cast

from lockstep.errors import UserError
from lockstep.processes.files import to_json, write_error
from lockstep.processes.lock import try_lock
from lockstep.watch.records import EndRecord, Mirror, Record

_ORPHAN_S = 10.0  # that a rank whose launcher was killed may take to end, on a busy machine


class Journal:
    """`write(record)` appends a record and passes it to the mirrors; without a path it does nothing.

    `alone`: as the run's one writer. Raises UserError where another process stays that.
    """

    def __init__(self, path: Path | None, mirrors: tuple[Mirror, ...] = (), alone: bool = False) -> None:
        self.file = _opened_to_append(path) if path else None
        if self.file is not None and alone and not try_lock(self.file.fileno(), _ORPHAN_S):
            raise UserError(f"another process writes {path}", "Wait until it has ended, or name another --out.")
        self.path, self.mirrors = path, mirrors

    def write(self, record: Record) -> None:
        """Append one record, with the time in seconds since 1970. Raises UserError where the disk refuses."""
        if self.file is None:
            return
        record = cast(Record, {"kind": record["kind"], "time": round(time.time(), 3), **record})
        line = to_json(record) + "\n"
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as error:
            file, self.file = self.file, None  # the end record will not fit either
            with suppress(OSError):
                file.close()
            raise write_error(cast(Path, self.path), error) from error
        for mirror in self.mirrors:
            mirror(record)

    def close(self) -> None:
        """Close the file; mirrors close themselves on the `end` record."""
        if self.file is not None:
            self.file.close()


def append(path: Path, record: Record) -> None:
    """One record, from whoever is left to write it: the run's own writer may hang, or have died within a line."""
    with closing(Journal(path)) as journal:
        if journal.file is not None and not _at_a_line(path):
            journal.file.write("\n")
        journal.write(record)


def _at_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END) == 0 or (file.seek(-1, os.SEEK_END) >= 0 and file.read(1) == b"\n")


def _opened_to_append(path: Path) -> TextIO:
    require_plain(path)
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise write_error(path, error) from error


def require_plain(path: Path) -> None:
    """Raise UserError where something else than a file is at this path: a FIFO would be waited for, for good."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file", "Move it away, or name another folder with --out.")


def read(path: Path, skipped: Callable[[int], object] = lambda _: None) -> list[Record]:
    """The records of a journal, which may have been torn or damaged anywhere.

    `skipped` is called with the number of each line that is none: the last, where a crash cut it short, or one that
    the disk garbled.

    Raises:
        UserError: where it is no file, or can't be read.
    """
    require_plain(path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}", "Give this user the right to read it.") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            records.append(cast(Record, record))
        elif line.strip():
            skipped(number)
    return records


def mend(path: Path) -> str:
    """Before a run appends to its journal again: cut off a last line that a crash left half, and tell what is lost."""
    if not path.exists():
        return ""
    lost: list[int] = []
    read(path, lost.append)
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        kept, _, _ = content.rpartition(b"\n")
        try:
            with path.open("r+b") as file:
                if lost and lost[-1] == len(content.splitlines()):
                    file.truncate(len(kept) + 1 if kept else 0)
                else:  # whole but for its end
                    file.seek(len(content))
                    file.write(b"\n")
        except OSError as error:
            raise write_error(path, error) from error
    if not lost:
        return ""
    names = ", ".join(map(str, lost[:5])) + (" and more" if len(lost) > 5 else "")
    return f"{path.name}: line {names} can't be read and was left out"


def seal(step: int, digest: str) -> str:
    """What a checkpoint's record holds of itself."""
    return hashlib.sha256(f"{step} {digest}".encode()).hexdigest()[:16]


def end_of(records: Sequence[Record]) -> EndRecord | None:
    """The last record where it is an `end`: None while a run goes on, and after a crash."""
    return records[-1] if records and records[-1]["kind"] == "end" else None
