"""Weights out of somebody else's file: as they are, or for other classes and colours than they were learned for."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.weights import bare, first, fit, note_of, read, state_tensors
from lockstep.errors import UserError, reason, refusal
from lockstep.parallel.strategy import unwrap
from lockstep.processes.files import named

_NESTS = ("state_dict", "model_state_dict", "model", "net")  # where training scripts put the weights among other things
_OF_A_FOLDER = ("model.safetensors", "pytorch_model.bin", "weights/best.safetensors")
_ENDINGS = (".safetensors", ".bin", ".pth", ".pt")
_SAVE = "Save the weights alone: torch.save(model.state_dict(), path), or as safetensors."


def read_foreign(path: str | Path) -> dict[str, Tensor]:
    """The weights in somebody's file, on the CPU, by the names that they have there.

    Read are safetensors files and those of torch.save, the latter by `torch.load(weights_only=True)` alone, which
    builds tensors and plain containers and calls nothing else. The state_dict may lie under "state_dict",
    "model_state_dict", "model" or "net". The content decides, not the file's name. Of a folder it is the one file of
    weights in it, as the Hugging Face hub names it, or the best ones of a run.

    Raises:
        UserError: for a missing file, and for one that holds anything else.
    """
    path = _inside(Path(path))
    try:
        by_torch = path.is_file() and not _looks_like_safetensors(path)
        found: Any = _read_torch(path) if by_torch else read(path)
    except OSError as error:
        raise UserError(f"can't read {path}: {refusal(error)}", "Is it yours to read?") from error
    for name in _NESTS:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
            break
    if not isinstance(found, Mapping) or not found:
        raise UserError(f"{path} holds no state_dict but a {type(found).__name__}", _SAVE)
    if strange := [
        str(name) for name, value in found.items() if not (isinstance(name, str) and isinstance(value, Tensor))
    ]:
        raise UserError(f"{path} holds a dict with entries that are no weights: {first(strange)}", _SAVE)
    return {name: value.detach() for name, value in found.items()}


def load_foreign(
    model: nn.Module, path: str | Path, adapt: bool = False, classes: Sequence[str] | None = None
) -> list[str]:
    """Copy the weights in somebody's file into the model, on its own device; what is before all names is no obstacle.

    `adapt`: where the file's last layer is of another shape, or as it says itself for other classes than these, the
    model's stays as it was drawn; where its first convolution sees other colours, it is summed over them for grey
    images, or shared out over those of the model. Returns what was done of that, a line each.

    Raises:
        UserError: as `read_foreign`, and where names or shapes are not the model's.
    """
    known = note_of(_inside(Path(path))).get("classes")
    others = classes is not None and known is not None and known != json.dumps(list(classes))
    done = take(model, read_foreign(path), str(path), adapt, anew=others and adapt)
    if others and not adapt:
        done.append("its last layer stays, though it was trained for other classes (--adapt-init draws it anew)")
    return done


def take(model: nn.Module, found: Mapping[str, Tensor], path: str, adapt: bool, anew: bool = False) -> list[str]:
    """As `load_foreign`, of tensors that were read from `path`; `anew`: without their last layer, if that fits too."""
    own = state_tensors(model)
    found = _under_own_names(dict(found), own)
    changed, done = _adapted(unwrap(model), found, own, anew)
    if done and not adapt:
        unlike = [f"{n} {list(found[n].shape)}, the model has {list(own[n].shape)}" for n in found if n in changed]
        raise UserError(
            f"{path} does not fit {type(unwrap(model)).__name__}: another shape: {first(unlike)}",
            f"Build the model that wrote it, or give --adapt-init: {'; '.join(done)}.",
        )
    fit(model, found | changed, path)
    return done


def _under_own_names(found: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without a wrapper's prefix, and without an attribute's (`model.`, as in Lightning) if the model is below it."""
    found = bare(found, own)
    needed = [name for name in own if not name.endswith("num_batches_tracked")]
    begin = needed[0] if needed else ""
    for prefix in {name.removesuffix(begin) for name in found if begin and name.endswith(f".{begin}")}:
        if all(prefix + name in found for name in needed) and not any(name in found for name in needed):
            return {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def _adapted(
    model: nn.Module, found: Mapping[str, Tensor], own: Mapping[str, Tensor], anew: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """What to take instead of the tensors whose shapes don't fit, and what that means; nothing where others don't."""
    if {name for name in own.keys() ^ found.keys() if not name.endswith("num_batches_tracked")}:
        return {}, []
    layers = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    head = layers[-1] if anew and layers[1:] else None
    unlike = [
        name
        for name in own
        if name in found and (found[name].shape != own[name].shape or name.rpartition(".")[0] == head)
    ]
    convolution = next((name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)), "")
    instead: dict[str, Tensor] = {}
    done: list[str] = []
    for name in unlike:
        layer, _, _ = name.rpartition(".")
        theirs, ours = found[name], own[name]
        if layer == convolution and theirs.ndim == 4 and theirs.shape[0] == ours.shape[0]:
            if theirs.shape[2:] != ours.shape[2:] or 1 not in (theirs.shape[1], ours.shape[1]):
                return {}, []
            instead[name] = theirs.sum(1, keepdim=True) / ours.shape[1] * torch.ones_like(ours[:1], device="cpu")
            done.append(f"{layer} is summed over its {theirs.shape[1]} input channel(s)")
        elif layers[1:] and layer == layers[-1]:
            instead[name] = ours
            done.append(f"{layer} is drawn anew")
        else:
            return {}, []
    return instead, list(dict.fromkeys(done))


def _inside(path: Path) -> Path:
    """The file itself, or the file of weights in a folder. Raises UserError where that has none, or several."""
    if not named(str(path)).is_dir():
        return path
    for name in _OF_A_FOLDER:
        if (path / name).is_file():
            return path / name
    found = sorted(file.name for file in path.iterdir() if file.suffix in _ENDINGS)
    if len(found) == 1:
        return path / found[0]
    if not found:
        raise UserError(f"no weights at {path}: the folder holds no {', '.join(_OF_A_FOLDER)}", "Name the file.")
    raise UserError(f"the folder {path} holds several files of weights: {first(found)}", "Name the file.")


def _looks_like_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8


def _read_torch(path: Path) -> Any:
    try:
        with path.open("rb") as file:  # given a path, torch goes by its ending
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # hostile or damaged bytes end in errors of any type
        advice = "weights_only" in str(error)  # torch's own: to have the file run its code
        why = "torch finds more than tensors in it" if advice else reason(error)
        raise UserError(
            f"{path} is neither a safetensors file nor one of weights alone: {why}",
            "Files that need code to be read are refused, because reading them would run it. " + _SAVE,
        ) from error
