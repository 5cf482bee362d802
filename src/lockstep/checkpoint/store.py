"""Checkpoints in a run's folder: each is whole or not there, whenever the process or the disk gives out."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.format import MANIFEST, STATE, FileRecord, Manifest, safetensors_pieces
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.errors import UserError
from lockstep.processes.files import fsync, write_error

_CHUNK = 4 << 20  # bytes hashed and written at a time: both release the interpreter, so training goes on beside them
_HIDDEN = re.compile(r"\.(?P<why>writing|removing|replaced)-[0-9a-f]{8}-(?P<name>step-\d+)")

Phase = Callable[[str], None]  # called between the phases of a write, with the name of the one that begins


@dataclass(frozen=True)
class Written:
    """A checkpoint that is on the device."""

    path: Path
    step: int
    digest: str  # of its manifest: kept in the journal, so that a forged checkpoint is found out
    bytes: int


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:09d}"


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step, in rising order, good or bad. Raises UserError where it can't be listed."""
    try:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise UserError(f"can't list {folder}: {error.strerror}", "Give this user the right to read there.") from error
    found = {int(name.removeprefix("step-")): folder / name for name in names if re.fullmatch(r"step-\d{9,18}", name)}
    return {step: path for step, path in sorted(found.items()) if path.name == name_of(step)}


def write(snapshot: Snapshot, folder: Path, at: Phase = lambda _: None) -> Written:
    """Make `folder/step-...` of a snapshot: when this returns it is on the device, before that it isn't there at all.

    A checkpoint of the same step is replaced. All others are left as they are, whatever happens.

    Raises:
        UserError: where the disk is full, read-only, gone, or fails: the path, the system's reason and the remedy.
    """
    target = folder / name_of(snapshot.step)
    temporary = folder / f".writing-{os.urandom(4).hex()}-{target.name}"
    at("begin")
    try:
        folder.mkdir(exist_ok=True)
        temporary.mkdir()
        try:
            with _locked(temporary):
                manifest = _fill(temporary, snapshot, at)
                _publish(temporary, target, at)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # what can't be removed now, `tidy` removes
    except OSError as error:
        raise write_error(target, error, "the checkpoint ") from error
    at("end")
    return Written(target, snapshot.step, manifest.digest, sum(f.bytes for f in manifest.files.values()))


def _fill(temporary: Path, snapshot: Snapshot, at: Phase) -> Manifest:
    files = {}
    for name, tensors in snapshot.tensors.items():
        at(name)
        files[name] = write_file(temporary / name, _announced(safetensors_pieces(tensors), name, at))
    at(STATE)
    files[STATE] = write_file(temporary / STATE, [json.dumps(snapshot.document).encode()])
    at(MANIFEST)
    manifest = Manifest(snapshot.step, files)
    write_file(temporary / MANIFEST, [manifest.to_bytes()])
    at("sync")
    fsync(temporary)
    return manifest


def _announced(pieces: Iterator[bytes | memoryview], name: str, at: Phase) -> Iterator[bytes | memoryview]:
    yield next(pieces)
    at(f"{name} half")
    yield from pieces


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and have it on the device. Raises OSError, also where there is a file of this name."""
    sha, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                file.write(chunk)
                sha.update(chunk)
            size += len(view)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, sha.hexdigest())


def _publish(temporary: Path, target: Path, at: Phase) -> None:
    at("rename")
    old = None
    if os.path.lexists(target):
        old = hide(target, "replaced")
        at("replace")  # killed here, `tidy` gives the old one its name back
    temporary.rename(target)
    at("sync parent")
    fsync(target.parent)
    if old is not None:
        remove_folder(old)


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
    match = _HIDDEN.fullmatch(folder.name)
    return folder.rename(folder.with_name(f".{why}-{os.urandom(4).hex()}-{match['name'] if match else folder.name}"))


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a lock on a folder, which ends with this process at the latest; False where another one holds it.

    A file system without locks gives True: `tidy` takes every unfinished folder there for a dead writer's.
    """
    descriptor, free = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            free = not isinstance(error, BlockingIOError)
        yield free
    finally:
        os.close(descriptor)


def _is_free(folder: Path) -> bool:
    with _locked(folder) as free:
        return free


def tidy(folder: Path) -> list[str]:
    """Clear away what writers that were killed left behind; returns the names. For the start of a run, on one rank.

    A writer that still lives keeps its folder. Raises UserError where the folder can't be written.
    """
    done = []
    try:
        for path in sorted(folder.iterdir()) if folder.exists() else []:
            match = _HIDDEN.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_dir():  # of such a name, and no writer's
                continue
            if match["why"] == "writing" and not _is_free(path):
                continue
            target = folder / match["name"]
            if match["why"] == "replaced" and not os.path.lexists(target):
                path.rename(target)
            else:
                remove_folder(path)
            done.append(path.name)
    except OSError as error:
        raise write_error(folder, error, "the checkpoint folder ") from error
    return done


def prune(folder: Path, keep: int, best: int | None = None, at: Phase = lambda _: None) -> list[int]:
    """Remove all checkpoints but the last `keep` and that of step `best`; returns the removed steps.

    Raises:
        UserError: where one can't be removed.
    """
    if keep < 1:
        raise UserError(f"--keep {keep} would keep no checkpoint", "Use 1 or more.")
    present = steps(folder)
    doomed = [step for step in list(present)[:-keep] if step != best]
    for step in doomed:
        try:
            at("prune")
            hidden = hide(present[step], "removing")
            at("pruned")
            remove_folder(hidden)
        except FileNotFoundError:
            continue  # somebody else removed it
        except OSError as error:
            raise write_error(present[step], error, "(remove) the old checkpoint ") from error
    return doomed


def abandon(folder: Path, after: int) -> list[str]:
    """Rename the checkpoints of steps after this one to `abandoned-...`; returns their old names.

    For a run that goes back: later checkpoints belong to a course that it left, and must not be resumed from.
    """
    return [path.name for step, path in steps(folder).items() if step > after and set_aside(path, "abandoned")]


def set_aside(path: Path, why: str) -> bool:
    """Rename a checkpoint to `WHY-step-...`, with a number where that is taken; False where it can't be renamed."""
    for number in range(1000):
        aside = path.with_name(f"{why}-{path.name}" + (f"-{number}" if number else ""))
        if not os.path.lexists(aside):
            with suppress(OSError):
                path.rename(aside)
                return True
            return False
    return False
