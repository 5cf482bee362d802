"""The files of a checkpoint: tensors as safetensors, everything else as JSON, and a manifest with their digests."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
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


def tensor_bytes(tensor: Tensor) -> Tensor:
    """A host tensor's elements as uint8 [bytes], in logical order; no copy where it is laid out so."""
    data = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return data.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def require_storable(name: str, tensor: Tensor) -> None:
    """Raise UserError for a tensor that a checkpoint can't hold: sparse, quantised, or of an exotic dtype."""
    if tensor.layout != torch.strided or not (tensor.is_complex() or tensor.dtype in _DTYPES):
        remedy, dtype = "Keep the state of model and optimizer in dense tensors of a usual dtype.", tensor.dtype
        raise UserError(f"{name} is a tensor of {tensor.layout} and {dtype}, which a checkpoint can't hold", remedy)


def safetensors_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of host tensors. Equal ones give equal bytes: the library's own don't."""
    metadata = dict(sorted((metadata or {}).items()))
    if pairs := [name for name, tensor in tensors.items() if tensor.is_complex()]:
        metadata["complex"] = json.dumps(pairs)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    # widest elements first, so that every tensor is aligned in the file, as readers that map it expect
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in names:
        dtype, shape = tensors[name].dtype, list(tensors[name].shape)
        if tensors[name].is_complex():
            dtype, shape = dtype.to_real(), [*shape, 2]
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensor_bytes(tensors[name]).numpy().data


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; they are mapped: read when they are used. Raises Damaged."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
            for name in parse_json(metadata.pop("complex", "[]").encode(), path.name):
                tensors[name] = torch.view_as_complex(tensors[name])
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise Damaged(f"{path.name}: {reason(error)}") from error
    return tensors, metadata


def encode(value: Any, where: str, tensor: Callable[[str, Tensor], str] | None = None) -> Any:
    """A tree of plain values as JSON, from which `decode` makes the same types and the same bits again.

    What JSON lacks stands under a key with a dollar sign. `tensor(where, t)` files a tensor away and returns its name.
    Raises UserError for anything else than None, bool, int, float, str, list, tuple, dict and tensors.
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
        "Keep tensors, numbers, text, None, lists, tuples and dicts in it, and build the rest again when resuming.",
    )


def decode(value: Any, tensor: Callable[[str, str], Tensor] | None = None, key: str = "") -> Any:
    """The inverse of `encode`; Damaged for what that never makes. `tensor(name, key)` finds a tensor by both."""
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

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice")
        return values

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, object_pairs_hook=distinct, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} can't be read: {error}") from error


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
    def _entries(self) -> dict[str, Any]:
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        return {"format": FORMAT, "step": self.step, "files": files}

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the manifest's other entries."""
        return hashlib.sha256(_canonical(self._entries)).hexdigest()

    def to_bytes(self) -> bytes:
        """The content of manifest.json."""
        return _canonical({**self._entries, "digest": self.digest})

    @classmethod
    def from_bytes(cls, text: bytes) -> "Manifest":
        """The inverse of `to_bytes`; there is one text per manifest, to the byte.

        Raises Damaged for any other text, and UserError for one of a newer format, which may well be in order.
        """
        found = parse_json(text, MANIFEST)
        rest = {key: value for key, value in found.items() if key != "digest"} if isinstance(found, dict) else {}
        if not rest or found.get("digest") != hashlib.sha256(_canonical(rest)).hexdigest():
            raise Damaged(f"{MANIFEST} does not have the digest that it names")
        if type(number := rest.get("format")) is int and number > FORMAT:
            remedy = "Install a newer Lockstep to continue it."
            raise UserError(f"the checkpoint is of format {number}, and this version reads up to {FORMAT}", remedy)
        step, files = rest.get("step"), rest.get("files")
        if type(step) is int and step >= 0 and isinstance(files, dict) and REQUIRED <= set(files) <= KNOWN:
            manifest = cls(step, {name: _file_record(name, entry) for name, entry in files.items()})
            if manifest.to_bytes() == text:
                return manifest
        raise Damaged(f"{MANIFEST} is not as it was written")


def _file_record(name: str, entry: Any) -> FileRecord:
    match entry:
        case {"bytes": size, "sha256": str(sha)} if type(size) is int and size >= 0:
            if re.fullmatch("[0-9a-f]{64}", sha):
                return FileRecord(size, sha)
    raise Damaged(f"{MANIFEST} has no size and SHA-256 for {name}")


def _canonical(entries: dict[str, Any]) -> bytes:
    return (json.dumps(entries, indent=1) + "\n").encode()
