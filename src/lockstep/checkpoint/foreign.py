"""Weights from other programs' files: as they are, or for other classes and colours than they were trained for."""

import errno
import json
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint import weights
from lockstep.checkpoint.weights import NAME_A_FILE, listed
from lockstep.distributed.files import named
from lockstep.errors import UserError, reason, refusal, with_article
from lockstep.monitoring.journal import require_plain
from lockstep.parallel.strategy import unwrap

# where training scripts put the weights among other things: the weights themselves first, then their averages
_NESTS = ("state_dict", "model_state_dict", "model", "net", "module", "model_ema", "state_dict_ema")
_REFUSALS = (r"Unsupported global: GLOBAL ([\w.]+) was", r"Can only SETITEM.* got <class '([\w.]+)'>")
_MOST_TYPES = 200
_IN_FOLDERS = ("model.safetensors", "pytorch_model.bin", "weights/best.safetensors")
_SAVE = "Save the weights alone: torch.save(model.state_dict(), path), or as safetensors."
_AGAIN = "Download or copy the file again."


class _StandIn(list[Any]):
    """In place of an object of a type that torch does not take for plain data: it is not built."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    is_dict = False  # of a dict's type: torch sets items of plain ones alone

    def __new__(cls, *_: Any) -> Any:
        return OrderedDict() if cls.is_dict else super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, _: Any) -> None: ...


def read_foreign(path: str | Path) -> dict[str, Tensor]:
    """The weights in a file of another program, on the CPU, by the names that they have there.

    Read are safetensors files and those of torch.save, the latter by `torch.load(weights_only=True)` alone, which
    builds tensors and plain containers and calls nothing else. The content decides, not the file's name. Of a folder it
    is the file that the Hugging Face hub names so, or the best weights of a run. Raises UserError.
    """
    path = _file_at(Path(path))
    try:
        by_torch = path.exists() and _is_torch_file(path)
        found: Any = _read_torch(path) if by_torch else weights.read(path)
    except OSError as error:
        raise UserError(f"can't read {path}: {refusal(error)}", "Is it yours to read?") from error
    names = ["the file"]
    while isinstance(found, Mapping) and names:
        names = [name for name in _NESTS if isinstance(found.get(name), Mapping)]
        others: list[Any] = [] if names else [name for name, value in found.items() if _are_weights(value)]
        if len(others) > 1:
            raise UserError(f"{path} holds several sets of weights: {listed([*map(str, others)])}", _SAVE)
        names = names or others
        found = found[names[0]] if names else found
    if not isinstance(found, Mapping) or not found:
        what = "an empty dict" if isinstance(found, Mapping) else f"{with_article(found)}, not a state_dict"
        raise UserError(f"{path} holds {what}", _SAVE)
    if strange := [str(k) for k, v in found.items() if not (isinstance(k, str) and _is_plain(v))]:
        raise UserError(f"{path} holds a dict with entries that are no weights: {listed(strange)}", _SAVE)
    return {name: value.detach() for name, value in found.items()}


def _is_plain(value: Any) -> bool:
    """A tensor of numbers, each at its place: not sparse, nested or quantized, and not without its numbers."""
    plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return plain and not (value.is_quantized or value.is_meta)


def _are_weights(value: Any) -> bool:
    pairs = value.items() if isinstance(value, Mapping) else ()
    return bool(pairs) and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in pairs)


def load_foreign(
    model: nn.Module, path: str | Path, adapt: bool = False, classes: Sequence[str] | None = None
) -> list[str]:
    """Copy the weights in a file of another program into the model, on its own device.

    `adapt`: where the file's last layer has another shape, or is for other classes as the file says, the model's keeps
    its initial values; where its first convolution sees other colours, it is summed over them for grey images, or
    spread over those of the model. Returns what was done of that, a line each. Raises UserError where they don't fit.
    """
    known = weights.read_metadata(_file_at(Path(path))).get("classes")
    others = classes is not None and known is not None and known != json.dumps(list(classes))
    done = load_adapted(model, read_foreign(path), str(path), adapt, reset_head=others and adapt)
    if others and not adapt:
        done.append("its last layer stays, though it was trained for other classes (--adapt-init initialises it again)")
    return done


def load_adapted(
    model: nn.Module, found: Mapping[str, Tensor], path: str, adapt: bool, reset_head: bool = False
) -> list[str]:
    """As `load_foreign`, of tensors that were read from `path`; `reset_head`: without their last layer in any case."""
    own = weights.state_tensors(model)
    everything, found = found, weights.under_own_names(found, own)
    changed, done = _adapted(unwrap(model), found, own, reset_head)
    if done and not adapt:
        lines = weights.diff_tensors({name: found[name] for name in changed}, {name: own[name] for name in changed})
        raise UserError(
            f"{path} does not fit {type(unwrap(model)).__name__} (file -> model): {listed(lines)}",
            f"Build the model that wrote it, or give --adapt-init: {'; '.join(done)}.",
        )
    weights.load_tensors(model, found | changed, path)
    kept = {id(tensor) for tensor in found.values()}
    left = [name for name, tensor in everything.items() if id(tensor) not in kept and name != "n_averaged"]
    return [*done, f"{listed(left)} in it are not the model's, and left out"] if left else done


def _adapted(
    model: nn.Module, found: Mapping[str, Tensor], own: Mapping[str, Tensor], reset_head: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Replacements for the tensors whose shapes don't fit, and what was done; nothing where one can't be replaced."""
    if {name for name in own.keys() ^ found.keys() if not name.endswith("num_batches_tracked")}:
        return {}, []
    layers = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    head = layers[-1] if layers[1:] else None
    convolution = next((name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)), "")
    instead: dict[str, Tensor] = {}
    done: list[str] = []
    for name, ours in own.items():
        layer, theirs = name.rpartition(".")[0], found.get(name, ours)
        if theirs.shape == ours.shape and not (reset_head and layer == head):
            continue
        if layer == convolution and theirs.ndim == 4 and theirs.shape[0] == ours.shape[0]:
            if theirs.shape[2:] != ours.shape[2:] or 1 not in (theirs.shape[1], ours.shape[1]):
                return {}, []
            instead[name] = theirs.sum(1, keepdim=True) / ours.shape[1] * torch.ones_like(ours[:1], device="cpu")
            done.append(f"{layer} is summed over its {theirs.shape[1]} input channel(s)")
        elif layer == head:
            instead[name] = ours
            done.append(f"{layer} keeps its initial values")
        else:
            return {}, []
    return instead, list(dict.fromkeys(done))


def _file_at(path: Path) -> Path:
    """The file itself, or the file of weights in a folder. Raises UserError where that has none."""
    if named(str(path)).is_dir():
        found = [path / name for name in _IN_FOLDERS if (path / name).exists()]
        if not found:
            what = f"no weights at {path}: the folder holds no {', '.join(_IN_FOLDERS)}"
            parts = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE makes a file of it."
            raise UserError(what, parts if (path / ".metadata").exists() else "Name the file.")
        path = found[0]
    require_plain(path, NAME_A_FILE)
    return path


def _is_torch_file(path: Path) -> bool:
    """True for a file of torch.save, False for what safetensors may read. Raises UserError for what neither can."""
    with path.open("rb") as file:
        start = file.read(32)
    if start[8:9] == b"{":  # safetensors: behind the length of its header, which may begin with any byte
        return False
    if start.startswith(b"PK") and zipfile.is_zipfile(path):
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            if not any(Path(name).name == "data.pkl" for name in archive.namelist()):
                what = f"{path} is a zip archive without what torch.save writes: {listed(archive.namelist())}"
                raise UserError(what, f"Unpack it, and name a file of weights in it. {_SAVE}")
    if start.startswith((b"PK", b"\x80")):  # a zip archive; a pickle, as torch wrote before 1.6
        return True
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a pointer of Git LFS, not the weights", "Run `git lfs pull` where it comes from.")
    if not start or path.suffix != ".safetensors":
        what = "holds neither safetensors nor what torch.save writes" if start else "is empty"
        raise UserError(f"{path} {what}", _AGAIN)
    return False


def _read_torch(path: Path) -> Any:
    stand_ins: dict[str, type[_StandIn]] = {}  # by the names of the types that torch refuses
    while True:
        try:
            known = torch.serialization.safe_globals([(each, name) for name, each in stand_ins.items()])
            with known, path.open("rb") as file:  # given a path, torch goes by its ending
                return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # hostile or damaged bytes end in errors of any type
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that: cut off
                raise
            says = str(error)
            unknown, plain = (re.search(pattern, says) for pattern in _REFUSALS)
            if unknown and unknown[1] not in stand_ins and len(stand_ins) < _MOST_TYPES:
                for name in (unknown[1], f"builtins.{unknown[1]}"):
                    stand_ins[name] = type(name, (_StandIn,), {"__module__": "builtins"})
            elif plain and plain[1] in stand_ins and not stand_ins[plain[1]].is_dict:
                stand_ins[plain[1]].is_dict = True
            elif "TorchScript" in says:
                remedy = "Save its weights alone: torch.save(torch.jit.load(path).state_dict(), 'weights.pt')."
                raise UserError(f"{path} holds a TorchScript program, which would have to run", remedy) from error
            elif "weights_only" in says:  # torch's own advice: to have the file run its code
                blocked = re.search(r"GLOBAL ([\w.]+)", says)
                what = f"a {blocked[1]}" if blocked else "more than tensors"
                raise UserError(f"{path} holds {what}: reading it could run code, so it is refused", _SAVE) from error
            else:
                raise UserError(f"{path} is damaged: {reason(error).partition('. ')[0]}", _AGAIN) from error
