"""`lockstep export`: a run's weights as one file for other programs."""

import dataclasses
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.commands.shared.helping import asked
from lockstep.config.fields import require
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError
from lockstep.processes.files import atomic_write, write_error

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.inference.classifier import Classifier

_ENDINGS = {"safetensors": ".safetensors", "torch": ".pt", "pt2": ".pt2", "onnx": ".onnx"}
_COMPARED = 16  # pictures


@dataclass(frozen=True)
class Export:
    """What `lockstep export` takes beside the run folder."""

    to: Literal["safetensors", "torch", "pt2", "onnx"] = "safetensors"
    """safetensors; a torch.save file that `torch.load(weights_only=True)` reads; or a program: torch.export, ONNX."""
    weights: Literal["best", "final"] = "best"
    """Which of the run's saved weights."""
    out: Annotated[str, arg(help_behavior_hint="(default: RUN-WEIGHTS with the format's ending)")] = ""
    """The file to make."""
    pictures: Annotated[str, arg(help_behavior_hint="(default: the run's validation set)")] = ""
    """A folder of pictures on which a program is compared with the model."""
    data_dir: Annotated[str, arg(help_behavior_hint="(default: the run's)")] = ""
    """Where the run's data lie."""
    trust_code: bool = False
    """Import and call the code that the run names, as --model package.module:factory did."""


def main(args: list[str]) -> int:
    """Write a run's weights for other programs."""
    names, rest = split_arguments(args, Export)
    run_folder = one_name("export", "run folder", names)
    if not run_folder and asked(rest) is None:
        raise UserError("export needs a run folder", "As `lockstep export runs/digits-20260101-120000`.")
    chosen: Export = parse(
        Export,
        Export(),
        rest,
        "lockstep export RUN",
        "Write a run's weights, or the model, as one file for other programs.",
    )
    print(export(run_folder, chosen))
    return 0


def export(run: str | Path, chosen: Export) -> Path:
    """Write a run's weights, or its model as a program, as one file for other programs. Returns its path.

    Weights have the model's bare names. A program is run on pictures and compared with the model before it is named so.

    Raises:
        UserError: where the run has no such weights, the file exists or can't be written, or a program differs.
    """
    from lockstep.inference.loading import weights_file

    source = weights_file(run, chosen.weights)
    name = f"{Path(run).resolve().name}-{chosen.weights}" if Path(run).is_dir() else source.stem
    path = Path(chosen.out or f"{name}{_ENDINGS[chosen.to]}")
    if path.exists():
        raise UserError(f"{path} exists already", "Name another file with --out, or remove that one.")
    if chosen.to in ("safetensors", "torch"):
        _write_weights(source, path, chosen.to)
    else:
        _write_program(Path(run), source, path, chosen)
    return path


def _write_weights(source: Path, path: Path, form: str) -> None:
    import torch

    from lockstep.checkpoint import weights

    tensors = {name: tensor.clone() for name, tensor in weights.read(source, ours=True).items()}
    try:
        with atomic_write(path) as temporary:
            if form == "torch":
                with temporary.open("wb") as file:  # given a path, torch reports what the system refused without errno
                    torch.save(tensors, file)
            else:
                weights.write_sealed(tensors, temporary, weights.note_of(source) | {"format": "pt"})
    except (OSError, RuntimeError) as error:  # how these libraries report what the system refused
        raise write_error(path, error) from error


def _write_program(run: Path, source: Path, path: Path, chosen: Export) -> None:
    from lockstep.inference import programs
    from lockstep.inference.loading import load

    classifier = load(source, trust_code=chosen.trust_code)
    images = _pictures(run, classifier, chosen)
    with tempfile.TemporaryDirectory(prefix="lockstep-export-") as folder:
        made = Path(folder, f"program{_ENDINGS[chosen.to]}")
        programs.save(classifier, made, chosen.to)
        worst, largest = programs.largest_difference(programs.load(made), classifier, images)
        if not worst <= programs.BOUND * max(1.0, largest):  # NaN is no agreement either
            raise UserError(
                f"the {chosen.to} program differs from the model by {worst:.3g} in logits of up to {largest:.3g}",
                "Export the weights (--to safetensors), and say which model it is.",
            )
        try:
            with atomic_write(path) as temporary:
                shutil.copyfile(made, temporary)
        except OSError as error:
            raise write_error(path, error) from error
    print(
        f"compared with the model on {len(images)} pictures: logits up to {largest:.3g} differ by at most {worst:.2g}",
        file=sys.stderr,
    )


def _pictures(run: Path, classifier: "Classifier", chosen: Export) -> "Tensor":
    """A few images as the network gets them, float32 [b, C, H, W]: --pictures, else of the run's validation set."""
    import numpy as np
    import torch

    from lockstep.inference.pictures import find
    from lockstep.processes.world import World
    from lockstep.training.assemble import load_data
    from lockstep.training.folder import read_config, require_trusted

    if chosen.pictures:
        return torch.stack([classifier.transform(file) for file in find([chosen.pictures])[:_COMPARED]])
    require(
        run.is_dir(),
        f"{run} is no run folder, which would name pictures to compare the program with the model on",
        "Name some: --pictures FOLDER.",
    )
    config = read_config(str(run))
    require_trusted(config, str(run), chosen.trust_code)
    if chosen.data_dir:
        config = dataclasses.replace(config, execution=dataclasses.replace(config.execution, data_dir=chosen.data_dir))
    _, images = load_data(config, World.single())
    ids = np.linspace(0, len(images) - 1, min(_COMPARED, len(images))).astype(np.int64)
    pixels, _ = images.read(ids, None)
    return classifier.prepare(pixels, torch.from_numpy(ids), None)
