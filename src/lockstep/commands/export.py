"""`lockstep export`: a run's weights as one file for other programs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.config.fields import Arg
from lockstep.distributed.files import atomic_write, new_file, whole_file, write_error
from lockstep.distributed.output import for_people
from lockstep.errors import UserError

_ENDINGS = {"safetensors": ".safetensors", "torch": ".pt", "onnx": ".onnx"}
_COMPARED = 16  # images


@dataclass(frozen=True)
class Export:
    """What `lockstep export` takes beside the run folder."""

    to: Literal["safetensors", "torch", "onnx"] = "safetensors"
    """safetensors; a torch.save file that `torch.load(weights_only=True)` reads; or an ONNX program."""
    weights: Literal["best", "final"] = "best"
    """Which of the run's saved weights."""
    out: Annotated[str, Arg(unset="RUN-WEIGHTS with the format's ending")] = ""
    """The file to make."""
    trust_code: bool = False
    """Import and call the code that the weights name, as --model package.module:factory did."""


def main(args: list[str]) -> int:
    """Write a run's weights for other programs."""
    names, chosen = parse(Export(), args, "Write a run's weights, or the model, as one file for other programs.")
    run_folder = one_name("export", "run folder", names, "runs/digits-20260101-120000")
    print(export(run_folder, chosen))
    return 0


def export(run: str | Path, chosen: Export) -> Path:
    """Write a run's weights, or its model as a program, as one file for other programs. Returns its path.

    Weights have the model's bare names. A program is run on random images, and compared with the model, before it is
    named so.
    Raises UserError where the run has no such weights, the file is there, can't be written or has another format's
    ending, or a program differs.
    """
    from lockstep.inference.loading import weights_file

    form = next((form for form, ending in _ENDINGS.items() if chosen.out.endswith(ending)), chosen.to)
    if form != chosen.to:
        remedy = f"Give --to {form}, or a name that ends in {_ENDINGS[chosen.to]}."
        raise UserError(f"--out {chosen.out} is a name for --to {form}, and --to is {chosen.to}", remedy)
    source = weights_file(run, chosen.weights)
    name = f"{Path(run).resolve().name}-{chosen.weights}" if Path(run).is_dir() else source.stem
    path = new_file(chosen.out or f"{name}{_ENDINGS[chosen.to]}", "--out")
    if chosen.to in ("safetensors", "torch"):
        _write_weights(source, path, chosen.to)
    else:
        _write_program(source, path, chosen.trust_code)
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
                weights.write_sealed(tensors, temporary, weights.read_metadata(source) | {"format": "pt"})
    except (OSError, RuntimeError) as error:  # how these libraries report what the system refused
        raise write_error(path, error) from error


def _write_program(source: Path, path: Path, trust_code: bool) -> None:
    import torch

    from lockstep.inference import programs
    from lockstep.inference.loading import load

    classifier = load(source, trust_code=trust_code)
    card, drawn = classifier.card, torch.Generator().manual_seed(0)
    sizes = (1, 1), (card.side, card.side)
    colours, noise = (torch.randn(_COMPARED, card.shape[0], *size, generator=drawn) for size in sizes)
    with whole_file(path) as temporary:
        programs.save(classifier, temporary)
        worst, largest = programs.largest_difference(programs.load(temporary), classifier, colours + noise)
        if not worst <= programs.BOUND * max(1.0, largest):  # NaN is no agreement either
            raise UserError(
                f"the program differs from the model by {worst:.3g} in logits of up to {largest:.3g}",
                "Export the weights (--to safetensors), and say which model it is.",
            )
    says = f"logits up to {largest:.3g} differ by at most {worst:.2g}"
    said = f"compared with the model on {_COMPARED} random images: {says}"
    print(for_people(said, sys.stderr), file=sys.stderr)
