"""A model's weights: their digest, and as a safetensors file."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.checkpoint.format import octets
from lockstep.errors import UserError, reason
from lockstep.parallel.sharded import whole
from lockstep.parallel.strategy import unwrap
from lockstep.processes.files import atomic_write, write_error

_SHOWN = 4  # entries of each kind that a mismatch lists
_SEAL = "lockstep_sha256"  # the note's entry that vouches for the file: safetensors itself would not see a changed bit
_PREFIXES = ("module.", "_orig_mod.")  # what DDP, DataParallel and torch.compile put before every name


def digest(model: nn.Module) -> str:
    """SHA-256, in hex, of the unwrapped model's state_dict in its own order.

    It covers the elements' bytes alone, in logical order (so any memory format gives the same), little-endian. Every
    tensor comes to the CPU for it. All ranks call it together where the model is sharded.
    """
    sha = hashlib.sha256()
    for tensor in state_tensors(model).values():
        sha.update(octets(whole(tensor).detach().cpu()).numpy().data)
    return sha.hexdigest()


def save(model: nn.Module, path: str | Path, metadata: dict[str, str], here: bool = True) -> None:
    """Write the unwrapped model's state_dict. The file appears whole or not at all, also when the machine dies.

    Tied weights are written once per name, so that any reader can load the file. `here`: on this rank; where the model
    is sharded the others call it too, and hand in their parts.

    Raises:
        UserError: where the file can't be written.
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state_tensors(model).items():
        value = whole(tensor)
        if not here:
            continue
        value = value.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        tensors[name] = value.clone() if storage in seen else value
        seen.add(storage)
    if not here:
        return
    try:
        with atomic_write(path) as temporary:
            write_sealed(tensors, temporary, metadata)
    except OSError as error:
        raise write_error(path, error) from error


def write_sealed(tensors: dict[str, Tensor], path: Path, note: Mapping[str, str]) -> None:
    """Write tensors on the CPU with a note that vouches for both; equal ones make equal files.

    Raises:
        OSError: for whatever safetensors could not do, with the system's number where it tells that.
    """
    rest = {name: value for name, value in note.items() if name != _SEAL}
    path.touch()
    mode = path.stat().st_mode  # by the umask: safetensors would make a file that is for this user alone
    try:
        save_file(tensors, path, {**rest, _SEAL: _seal(tensors, rest)})
    except SafetensorError as error:
        refused = re.search(r"\(os error (\d+)\)", str(error))
        if refused is None:
            raise OSError(reason(error)) from error
        raise OSError(int(refused[1]), os.strerror(int(refused[1]))) from error
    path.chmod(stat.S_IMODE(mode))
    _sort_metadata(path)


def _seal(tensors: Mapping[str, Tensor], note: Mapping[str, str]) -> str:
    """SHA-256, in hex, of names, dtypes, shapes and elements of tensors on the CPU, and of the note beside them."""
    shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    rest = sorted((name, value) for name, value in note.items() if name != _SEAL)
    sha = hashlib.sha256(json.dumps([shapes, rest]).encode())
    for _, tensor in sorted(tensors.items()):
        sha.update(octets(tensor).numpy().data)
    return sha.hexdigest()


def _sort_metadata(path: Path) -> None:
    """Put a safetensors file's metadata in order, in place: they come in one that differs from process to process.

    Format: 8 bytes of the header's length, little-endian, the header in JSON, padded with spaces, the tensors.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header |= {"__metadata__": dict(sorted(header["__metadata__"].items()))} if "__metadata__" in header else {}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:  # it is the same text but for its order
            file.seek(8)
            file.write(text.ljust(length))


def load(model: nn.Module, path: str | Path) -> None:
    """Copy a safetensors file's weights into the model, on the model's own device.

    Names with a wrapper's prefix (`module.`) load too. The model is untouched where anything is wrong.

    Raises:
        UserError: for a missing or damaged file, or one whose names or shapes are not the model's.
    """
    fit(model, read(path, ours=True), str(path))


def read(path: str | Path, ours: bool = False) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. Raises UserError for a missing or damaged file.

    One that `save` wrote is compared with the digest in its note. `ours`: any other one, which has none, is refused.
    """
    if not Path(path).is_file():
        raise UserError(f"no weights at {path}", "Check the path; a run leaves its weights in its own folder.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            note = dict(file.metadata() or {})
        if (ours or _SEAL in note) and note.get(_SEAL) != _seal(tensors, note):
            raise SafetensorError("its contents are not those that it was written with")
    except (OSError, SafetensorError) as error:
        remedy = "Take another checkpoint, or export or download the file again."
        raise UserError(f"{path} is damaged or not a safetensors file: {reason(error)}", remedy) from error
    return tensors


def note_of(path: str | Path) -> dict[str, str]:
    """What `save` was told beside the weights; nothing for a file that can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}


def fit(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy weights into the model, on its own device; names with a wrapper's prefix fit too.

    Raises:
        UserError: for names or shapes that are not the model's, and for numbers that are not finite, naming `source`;
            the model is untouched then.
    """
    if broken := [name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]:
        raise UserError(f"{source} holds weights that are not finite: {first(broken)}", "Take an earlier file.")
    model = unwrap(model)
    own = state_tensors(model)
    found = bare(tensors, own)
    problems = {
        # old files don't have batch norm's count of batches, and torch takes it to be 0
        "missing": [name for name in own if name not in found and not name.endswith("num_batches_tracked")],
        "unexpected": [name for name in found if name not in own],
        "another shape": [
            f"{name} {list(found[name].shape)}, the model has {list(tensor.shape)}"
            for name, tensor in own.items()
            if name in found and found[name].shape != tensor.shape
        ],
        "no floating-point numbers": [
            f"{name} is {found[name].dtype}"
            for name, tensor in own.items()
            if name in found and tensor.is_floating_point() and not found[name].is_floating_point()
        ],
    }
    if any(problems.values()):
        lines = "; ".join(f"{kind}: {first(items)}" for kind, items in problems.items() if items)
        raise UserError(f"{source} does not fit {type(model).__name__}: {lines}", "Build the model that wrote it.")
    copy_into(model, {name: torch.zeros_like(t) for name, t in own.items() if name not in found} | found)


def copy_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy all entries into the model, as written by its own version: some modules ask, and a file does not say."""
    state = state_tensors(model)  # beside its entries torch notes the modules' versions
    state.update(tensors)
    unwrap(model).load_state_dict(state)


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The unwrapped model's state_dict, detached. Raises UserError where an entry is no tensor."""
    state = unwrap(model).state_dict()
    if strange := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise UserError(
            f"the model's state has entries that are not tensors: {first(strange)}",
            "Only tensors are saved: register them as buffers.",
        )
    return state


def bare(tensors: Mapping[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """Tensors without a wrapper's prefix before their names, where that gives no name twice and is not the model's."""
    return {name if name in own or _bare(name) in tensors else _bare(name): t for name, t in tensors.items()}


def _bare(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def first(items: list[str]) -> str:
    """The first few of some names, for an error."""
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
