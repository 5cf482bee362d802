"""Weights from elsewhere and for elsewhere: plain state_dicts as safetensors or as torch.save files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from tyro.conf import arg

from lockstep.checkpoint import weights
from lockstep.errors import UserError
from lockstep.files import atomic_write, write_error

_NESTS = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights among other things


@dataclass(frozen=True)
class Export:
    """What `lockstep export` takes beside the run folder."""

    format: Literal["safetensors", "torch"] = "safetensors"
    """safetensors, or a torch.save file that `torch.load(weights_only=True)` reads."""
    weights: Literal["best", "final"] = "best"
    """Which of the run's saved weights."""
    out: Annotated[str, arg(help_behavior_hint="(default: RUN-WEIGHTS.safetensors or .pt)")] = ""
    """The file to make."""


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The weights in somebody's file, on the CPU, by the names that they have there.

    Read are safetensors files and those of torch.save, the latter by `torch.load(weights_only=True)` alone, which
    builds tensors and plain containers and calls nothing else. The state_dict may lie under "state_dict",
    "model_state_dict" or "model". The content decides, not the file's name.

    Raises:
        UserError: for a missing file, and for one that holds anything else.
    """
    path = Path(path)
    try:
        by_torch = path.is_file() and not _looks_like_safetensors(path)
        found: Any = _read_torch(path) if by_torch else weights.read(path)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}", "Is it yours to read?") from error
    for name in _NESTS:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
            break
    if not isinstance(found, Mapping) or not found:
        raise UserError(f"{path} holds no state_dict but a {type(found).__name__}", _SAVE)
    if strange := [
        str(name) for name, value in found.items() if not (isinstance(name, str) and isinstance(value, Tensor))
    ]:
        raise UserError(f"{path} holds a dict with entries that are no weights: {', '.join(strange[:4])}", _SAVE)
    return {name: value.detach() for name, value in found.items()}


_SAVE = "Save the weights alone: torch.save(model.state_dict(), path), or as safetensors."


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copy the weights in somebody's file into the model, on its own device; a wrapper's prefix is no obstacle.

    Raises:
        UserError: as `read_weights`, and where names or shapes are not the model's.
    """
    weights.fit(model, read_weights(path), str(path))


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
        raise UserError(
            f"{path} is neither a safetensors file nor one of weights alone: {(str(error).splitlines() or [''])[0]}",
            "Files that need code to be read are refused, because reading them would run it. " + _SAVE,
        ) from error


def export(run: str | Path, chosen: Export) -> Path:
    """Write a run's weights as one file for other programs: the bare names and the tensors. Returns its path.

    Raises:
        UserError: where the run has no such weights, the file exists, or can't be written.
    """
    run = Path(run)
    source = run / "weights" / f"{chosen.weights}.safetensors"
    ending = {"safetensors": "safetensors", "torch": "pt"}[chosen.format]
    path = Path(chosen.out or f"{run.resolve().name}-{chosen.weights}.{ending}")
    if path.exists():
        raise UserError(f"{path} exists already", "Name another file with --out, or remove that one.")
    tensors = {name: tensor.clone() for name, tensor in weights.read(source).items()}
    try:
        with atomic_write(path) as temporary:
            if chosen.format == "torch":
                with temporary.open("wb") as file:  # given a path, torch reports what the system refused without errno
                    torch.save(tensors, file)
            else:
                save_file(tensors, temporary, {"format": "pt"})
    except (OSError, SafetensorError, RuntimeError) as error:  # how these libraries report what the system refused
        raise write_error(path, error) from error
    return path
