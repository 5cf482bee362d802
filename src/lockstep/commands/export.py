"""`lockstep export`: a run's weights as one file for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError
from lockstep.processes.files import atomic_write, write_error


@dataclass(frozen=True)
class Export:
    """What `lockstep export` takes beside the run folder."""

    format: Literal["safetensors", "torch"] = "safetensors"
    """safetensors, or a torch.save file that `torch.load(weights_only=True)` reads."""
    weights: Literal["best", "final"] = "best"
    """Which of the run's saved weights."""
    out: Annotated[str, arg(help_behavior_hint="(default: RUN-WEIGHTS.safetensors or .pt)")] = ""
    """The file to make."""


def main(args: list[str]) -> int:
    """Write a run's weights for other programs."""
    names, rest = split_arguments(args, Export)
    run_folder = one_name("export", "run folder", names)
    if not run_folder and not {"-h", "--help"} & set(rest):
        raise UserError("export needs a run folder", "As `lockstep export runs/digits-20260101-120000`.")
    chosen: Export = parse(
        Export, Export(), rest, "lockstep export RUN", "Write a run's weights as one file for other programs."
    )
    print(export(run_folder, chosen))
    return 0


def export(run: str | Path, chosen: Export) -> Path:
    """Write a run's weights as one file for other programs: the bare names and the tensors. Returns its path.

    Raises:
        UserError: where the run has no such weights, the file exists, or can't be written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from lockstep.checkpoint import weights

    run = Path(run)
    source = run / "weights" / f"{chosen.weights}.safetensors"
    ending = {"safetensors": "safetensors", "torch": "pt"}[chosen.format]
    path = Path(chosen.out or f"{run.resolve().name}-{chosen.weights}.{ending}")
    if path.exists():
        raise UserError(f"{path} exists already", "Name another file with --out, or remove that one.")
    tensors = {name: tensor.clone() for name, tensor in weights.read(source, ours=True).items()}
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
