"""Reading a checkpoint: nothing in it is trusted before every byte agrees, and nothing in it is ever executed."""

import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint.format import (
    EMA,
    MANIFEST,
    OPTIMIZER,
    STATE,
    Damaged,
    FileRecord,
    Manifest,
    decode,
    parse_json,
    read_tensors,
)
from lockstep.checkpoint.store import name_of, set_aside, steps
from lockstep.errors import UserError, refusal

_MAX_MANIFEST = 1 << 16  # bytes; four files need 700
_MAX_STATE = 1 << 28
_BENT = f"{STATE} has not the entries of a checkpoint"
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO, errno.ENXIO}  # others are about rights and mounts


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that verified. Small: the tensors are still on the disk."""

    path: Path
    step: int
    digest: str  # of its manifest
    state: dict[str, Any]  # as given to `snapshot`
    document: dict[str, Any]  # the content of state.json
    has_ema: bool
    set_aside: tuple[tuple[str, str], ...] = ()  # (name, reason) of damaged checkpoints after it

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the other ranks, which need not read all of it again."""
        named = {"path": str(self.path), "step": self.step, "digest": self.digest, "has_ema": self.has_ema}
        return {**named, "document": self.document, "set_aside": self.set_aside}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Loaded":
        """The inverse of `to_dict`."""
        document = values["document"]
        aside = tuple((name, reason) for name, reason in values["set_aside"])
        state = decode(document["state"])
        return cls(Path(values["path"]), values["step"], values["digest"], state, document, values["has_ema"], aside)


def newest(folder: Path, journal: Mapping[int, str] | None = None) -> Loaded | None:
    """The newest checkpoint that verifies; None where there never was one. For one rank; the others `verify` its path.

    Damaged ones on the way are renamed to `damaged-...`, never deleted, and listed in the answer's `set_aside`.

    Args:
        journal: manifest digests by step, as the run's journal has them. Where a step is in it they must agree.

    Raises:
        UserError: where checkpoints there are or were, and none is good; or where they can't be read.
    """
    bad: list[tuple[str, str]] = []
    for step, path in reversed(steps(folder).items()):
        try:
            return replace(verify(path, (journal or {}).get(step)), set_aside=tuple(bad))
        except Damaged as damage:
            moved = set_aside(path, "damaged")
            bad.append((path.name, str(damage) if moved else f"{damage} (and it could not be renamed)"))
    earlier = sorted(path.name for path in folder.glob("damaged-step-*"))
    if bad or earlier:
        listed = "; ".join(f"{name}: {reason}" for name, reason in bad) or ", ".join(earlier)
        raise UserError(
            f"no good checkpoint is left in {folder} ({listed})",
            "Put a copy of one back, or start over in another folder with --out.",
        )
    return None


def open_checkpoint(path: Path, digest: str | None = None) -> Loaded:
    """A checkpoint that the user named, verified.

    Raises:
        UserError: where it is none, damaged, or can't be read. It stays where it is.
    """
    try:
        return verify(path.resolve(), digest)
    except Damaged as damage:
        raise UserError(
            f"{path} is no good checkpoint: {damage}", "Name a folder checkpoints/step-... of a run, or another one."
        ) from damage


def verify(path: Path, digest: str | None = None) -> Loaded:
    """Check every byte of a checkpoint: the list of files, each one's size and SHA-256, the manifest, the contents.

    No link is followed, no other file type opened, and no size believed that is not the file's own.

    Args:
        digest: of the manifest, where it is known from elsewhere.

    Raises:
        Damaged: with the reason.
        UserError: where it can't be read, or is of a newer format.
    """
    try:
        _require(stat.S_ISDIR(path.lstat().st_mode), "it is no folder")
        manifest = _manifest(path)
        _require(digest in (None, manifest.digest), f"{MANIFEST} is not the one that the journal noted")
        _require(name_of(manifest.step) == path.name, f"it holds step {manifest.step}")
        for name, record in manifest.files.items():
            with _opened(path / name, record.bytes, record) as file:
                _require(
                    hashlib.file_digest(file, "sha256").hexdigest() == record.sha256,
                    f"{name} has another SHA-256 than {MANIFEST} says",
                )
        state, document = _contents(path, manifest)
    except OSError as error:
        if error.errno in _DAMAGE:
            raise Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from error
        raise UserError(
            f"can't read the checkpoint {path}: {refusal(error)}",
            "Give this user the right to read it, or bring its storage back.",
        ) from error
    except RecursionError as error:
        raise Damaged(f"{STATE} is nested too deeply") from error
    return Loaded(path, manifest.step, manifest.digest, state, document, EMA in manifest.files)


def _manifest(path: Path) -> Manifest:
    present = {entry.name for entry in path.iterdir()}
    _require(MANIFEST in present, f"{MANIFEST} is missing")
    with _opened(path / MANIFEST, _MAX_MANIFEST) as file:
        manifest = Manifest.from_bytes(file.read())
    expected = {MANIFEST, *manifest.files}
    _require(expected <= present, f"missing: {', '.join(sorted(expected - present))}")
    _require(present <= expected, f"not in {MANIFEST}: {', '.join(map(repr, sorted(present - expected)))}")
    return manifest


@contextmanager
def _opened(path: Path, limit: int, record: FileRecord | None = None) -> Iterator[io.BufferedReader]:
    """A regular file of at most `limit` bytes, or of exactly those of its record; Damaged for anything else."""
    plain = f"{path.name} is no plain file"
    _require(stat.S_ISREG(path.lstat().st_mode), plain)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # it may have changed since
    with open(descriptor, "rb") as file:  # noqa: PTH123
        found = os.fstat(descriptor)
        _require(stat.S_ISREG(found.st_mode), plain)
        if record is not None:
            _require(found.st_size == record.bytes, f"{path.name} has {found.st_size} bytes instead of {record.bytes}")
        _require(found.st_size <= limit, f"{path.name} has {found.st_size} bytes, more than any has")
        yield file


def _contents(path: Path, manifest: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and document of a checkpoint whose files agree with its manifest: forged, it may hold anything still."""
    tensors = {name: read_tensors(path / name) for name in manifest.files if name != STATE}
    with _opened(path / STATE, _MAX_STATE) as file:
        document = parse_json(file.read(), STATE)

    def known(name: str, _: str) -> Tensor:
        _require(name in tensors[OPTIMIZER], f"{STATE} names {name!r}, which {OPTIMIZER} has not")
        return tensors[OPTIMIZER][name]

    match document:
        case {
            "state": state,
            "scaler": None | dict(),
            "optimizer": {
                "class": str(),
                "parameters": list(),
                "state": list(entries),
                "rest": dict(rest),
                "on_host": list(),
            },
        }:
            _require(all(isinstance(e, list) and len(e) == 2 and isinstance(e[0], int | str) for e in entries), _BENT)
            decode([entry[1] for entry in entries], known)
            _require(isinstance(rest.get("param_groups"), list), _BENT)
            decode(rest, known)
            plain = decode(state)
            _require(isinstance(plain, dict), _BENT)
            return plain, document
    raise Damaged(_BENT)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Damaged(reason)
