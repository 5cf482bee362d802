"""Checkpoints in a run's folder: each is whole or not there, whenever the process or the disk gives out."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint.format import MANIFEST, STATE, FileRecord, Manifest, safetensors_chunks
from lockstep.distributed.files import fsync, try_lock, writing
from lockstep.errors import UserError

_CHUNK = 4 << 20  # bytes hashed and written at a time: both release the interpreter, so training goes on beside them
_HIDDEN = re.compile(r"\.(?P<why>writing|removing|replaced)-[0-9a-f]{8}-(?P<name>step-\d+)")


@dataclass(frozen=True)
class Snapshot:
    """A step's state on the host."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # file -> name -> tensor
    document: Mapping[str, Any]  # the content of state.json


def folder_name(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:09d}"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step, in rising order, good or bad. Raises UserError where it can't be listed."""
    try:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise UserError(f"can't list {folder}: {error.strerror}", "Give this user the right to read there.") from error
    found = {int(name.removeprefix("step-")): folder / name for name in names if re.fullmatch(r"step-\d{9,18}", name)}
    return {step: path for step, path in sorted(found.items()) if path.name == folder_name(step)}


def write(snapshot: Snapshot, folder: Path) -> Manifest:
    """Make `folder/step-...` of a snapshot: when this returns it is on the device, before that it isn't there at all.

    A checkpoint of the same step is replaced, others are left as they are. Raises UserError where the disk refuses.
    """
    target = folder / folder_name(snapshot.step)
    temporary = folder / f".writing-{os.urandom(4).hex()}-{target.name}"
    with writing(target, "the checkpoint "):
        folder.mkdir(exist_ok=True)
        temporary.mkdir()
        try:
            with _locked(temporary):
                files = {
                    name: _write_file(temporary / name, safetensors_chunks(tensors))
                    for name, tensors in snapshot.tensors.items()
                }
                files[STATE] = _write_file(temporary / STATE, [json.dumps(snapshot.document).encode()])
                manifest = Manifest(snapshot.step, files)
                _write_file(temporary / MANIFEST, [manifest.to_bytes()])
                fsync(temporary)
                # killed between the two renames, `tidy` gives the old one its name back
                old = _hide(target, "replaced") if os.path.lexists(target) else None
                temporary.rename(target)
                fsync(folder)
                if old is not None:
                    _remove(old)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # what can't be removed now, `tidy` removes
    return manifest


def _write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and have it on the device. Raises OSError, also where there is a file of this name."""
    sha, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                file.write(part)
                sha.update(part)
            size += len(view)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, sha.hexdigest())


def _remove(folder: Path) -> None:
    """Remove a folder so that no moment shows half of it under its name. Raises OSError."""
    hidden = folder if folder.name.startswith(".removing-") else _hide(folder, "removing")
    with suppress(FileNotFoundError):
        shutil.rmtree(hidden)


def _hide(folder: Path, why: str) -> Path:
    """Rename a folder to `.WHY-RANDOM-NAME`, and return that path. One that is hidden already keeps its NAME."""
    match = _HIDDEN.fullmatch(folder.name)
    return folder.rename(folder.with_name(f".{why}-{os.urandom(4).hex()}-{match['name'] if match else folder.name}"))


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a lock on a folder; False where another process holds it. A file system without locks gives True."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


def tidy(folder: Path) -> list[str]:
    """Clear away what killed writers left; returns the names. For the start of a run, on one rank. Raises UserError."""
    done = []
    with writing(folder, "the checkpoint folder "):
        for path in sorted(folder.iterdir()) if folder.exists() else []:
            match = _HIDDEN.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_dir():  # of such a name, and no writer's
                continue
            if match["why"] == "writing":
                with _locked(path) as free:
                    if not free:
                        continue
            target = folder / match["name"]
            if match["why"] == "replaced" and not os.path.lexists(target):
                path.rename(target)
            else:
                _remove(path)
            done.append(path.name)
    return done


def prune(folder: Path, keep: int, best: int | None = None) -> list[int]:
    """Remove all checkpoints but the last `keep` and that of step `best`; returns their steps. Raises UserError."""
    if keep < 1:
        raise UserError(f"--keep {keep} would keep no checkpoint", "Use 1 or more.")
    present = list_checkpoints(folder)
    doomed = [step for step in list(present)[:-keep] if step != best]
    for step in doomed:
        # another process may have removed it
        with writing(present[step], "(remove) the old checkpoint "), suppress(FileNotFoundError):
            _remove(present[step])
    return doomed


def abandon(folder: Path, after: int) -> list[str]:
    """Rename the checkpoints of steps after this one to `abandoned-...`; returns their old names.

    For a run that goes back: later checkpoints belong to training that was undone, and must not be resumed from.
    """
    found = list_checkpoints(folder).items()
    return [path.name for step, path in found if step > after and set_aside(path, "abandoned")]


def set_aside(path: Path, why: str) -> bool:
    """Rename a checkpoint to `WHY-step-...`, with a number where that is taken; False where it can't be renamed."""
    names = (f"{why}-{path.name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(1, 1000))))
    free = next((name for name in names if not os.path.lexists(path.with_name(name))), None)
    try:
        return free is not None and bool(path.rename(path.with_name(free)))
    except OSError:
        return False
