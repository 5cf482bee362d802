"""The files of a checkpoint: tensors as safetensors, all else as JSON, and a manifest that vouches for both."""

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.errors import UserError, reason

FORMAT = 1
MODEL, OPTIMIZER, EMA, STATE, MANIFEST = (
    "model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json", "manifest.json",
)  # fmt: skip
REQUIRED, KNOWN = {MODEL, OPTIMIZER, STATE}, {MODEL, OPTIMIZER, EMA, STATE}

# safetensors' names; complex numbers are written as pairs of reals, which every version of it reads
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Damaged(Exception):
    """A checkpoint that is not what was written; the message is the reason."""


def octets(tensor: Tensor) -> Tensor:
    """A host tensor's elements as uint8 [bytes]: logical order, little-endian; complex numbers are (real, imaginary).

    Shares memory with `tensor` where that is laid out so already.
    """
    data = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = data.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if sys.byteorder == "big":
        flat = flat.view(-1, data.element_size()).flip(1).contiguous().view(-1)
    return flat


def require_storable(name: str, tensor: Tensor) -> None:
    """Raise UserError for a tensor that a checkpoint can't hold: sparse, quantised, or of an exotic dtype."""
    if tensor.layout != torch.strided or not (tensor.is_complex() or tensor.dtype in _DTYPES):
        raise UserError(
            f"{name} is a tensor of layout {tensor.layout} and dtype {tensor.dtype}, which a checkpoint can't hold",
            "Keep the state of model and optimizer in dense tensors of a usual dtype.",
        )


def safetensors_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file with these host tensors, one by one, without a copy of the whole."""
    complexes = [name for name, tensor in tensors.items() if tensor.is_complex()]
    header: dict[str, Any] = {"__metadata__": {"complex": json.dumps(complexes)}} if complexes else {}
    # widest elements first: every tensor is then aligned in the file, which readers that map it rely on
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    end = 0
    for name in names:
        dtype, shape = tensors[name].dtype, list(tensors[name].shape)
        if tensors[name].is_complex():
            dtype, shape = dtype.to_real(), [*shape, 2]
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield octets(tensors[name]).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file of ours, mapped into memory: they cost nothing until they are read.

    Raises:
        Damaged: where it is no such file.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            for name in parse_json((file.metadata() or {}).get("complex", "[]").encode(), path.name):
                tensors[name] = torch.view_as_complex(tensors[name])
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise Damaged(f"{path.name}: {reason(error)}") from error
    return tensors


def encode(value: Any, where: str, tensor: Callable[[str, Tensor], str] | None = None) -> Any:
    """A tree of plain values as JSON, from which `decode` makes the same types and the same bits again.

    What JSON lacks stands under a key with a dollar sign. `tensor(where, t)` files a tensor away and returns
    the name to find it by.

    Raises:
        UserError: for anything else than None, bool, int, float, str, list, tuple, dict and (with `tensor`) tensors.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor) and tensor is not None:
        return {"$tensor": tensor(where, value)}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}.{i}", tensor) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        pairs = [(key, encode(item, f"{where}.{key}", tensor)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": [[key, item] for key, item in pairs]}
    raise UserError(
        f"{where} is a {type(value).__qualname__}, which a checkpoint can't hold",
        "Keep tensors, numbers, text, None, lists, tuples and dicts in it, and make the rest anew when resuming.",
    )


def decode(value: Any, tensor: Callable[[str, str], Tensor] | None = None, key: str = "") -> Any:
    """The inverse of `encode`. `tensor(name, key)` finds a tensor; `key` is what it stands under in its dict.

    Raises:
        Damaged: for what `encode` never makes.
    """
    if isinstance(value, list):
        return [decode(item, tensor, key) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
        case [("$tensor", str(name))] if tensor is not None:
            return tensor(name, key)
        case [("$tuple", list(items))]:
            return tuple(decode(item, tensor, key) for item in items)
        case [("$dict", list(pairs))] if all(isinstance(p, list) and len(p) == 2 for p in pairs):
            if all(isinstance(name, str | int) for name, _ in pairs):
                return {name: decode(item, tensor, str(name)) for name, item in pairs}
        case items if not any(name.startswith("$") for name, _ in items):
            return {name: decode(item, tensor, name) for name, item in items}
    raise Damaged(f"{STATE} has an entry of no known kind: {json.dumps(value)[:80]}")


def parse_json(text: bytes, name: str) -> Any:
    """JSON as this library writes it: no NaN, no key twice. Raises Damaged for anything else."""
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} can't be read: {error}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in the manifest."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The step of a checkpoint and what its files must be; `digest` covers all of it."""

    step: int
    files: Mapping[str, FileRecord]

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the manifest's other entries."""
        return hashlib.sha256(_canonical(self._entries())).hexdigest()

    def _entries(self) -> dict[str, Any]:
        files = {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in sorted(self.files.items())}
        return {"format": FORMAT, "step": self.step, "files": files}

    def to_bytes(self) -> bytes:
        """The content of manifest.json."""
        return _canonical({**self._entries(), "digest": self.digest})

    @classmethod
    def from_bytes(cls, text: bytes) -> "Manifest":
        """The inverse of `to_bytes`; there is one text per manifest, to the byte.

        Raises:
            Damaged: for any other text.
            UserError: for a manifest of another format, which is in order as far as this version can tell.
        """
        found = parse_json(text, MANIFEST)
        if not isinstance(found, dict):
            raise Damaged(f"{MANIFEST} is no manifest")
        rest = {key: value for key, value in found.items() if key != "digest"}
        if found.get("digest") != hashlib.sha256(_canonical(rest)).hexdigest():
            raise Damaged(f"{MANIFEST} has not the digest that it names")
        if type(found.get("format")) is int and found["format"] > FORMAT:
            raise UserError(
                f"the checkpoint is of format {found['format']}, and this version reads up to {FORMAT}",
                "Install a newer Lockstep to continue it.",
            )
        step, files = found.get("step"), found.get("files")
        if type(step) is not int or step < 0 or not isinstance(files, dict):
            raise Damaged(f"{MANIFEST} lacks a step or its files")
        if strange := set(files) - KNOWN:
            raise Damaged(f"{MANIFEST} names a file that no checkpoint has: {min(strange)!r}")
        if missing := REQUIRED - set(files):
            raise Damaged(f"{MANIFEST} lacks {', '.join(sorted(missing))}")
        manifest = cls(step, {name: _record(name, entry) for name, entry in files.items()})
        if manifest.to_bytes() != text:
            raise Damaged(f"{MANIFEST} is not as it was written")
        return manifest


def _record(name: str, entry: Any) -> FileRecord:
    size, sha = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(sha, str) or not re.fullmatch("[0-9a-f]{64}", sha):
        raise Damaged(f"{MANIFEST} has no size and SHA-256 for {name}")
    return FileRecord(size, sha)


def _canonical(entries: dict[str, Any]) -> bytes:
    return (json.dumps(entries, indent=1) + "\n").encode()
