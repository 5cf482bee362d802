"""From a run folder, a weights file or a program to the classifier in it."""

from pathlib import Path

import torch

from lockstep import models
from lockstep.checkpoint import weights
from lockstep.checkpoint.weights import Card
from lockstep.errors import UserError
from lockstep.inference import programs
from lockstep.inference.classifier import Classifier
from lockstep.training.precision import configure


def load(run: str | Path, *, weights_of: str = "best", device: str = "cpu", trust_code: bool = False) -> Classifier:
    """The classifier of a run folder, of a weights file, or of a program that `lockstep export` wrote.

    Args:
        run: the folder, a safetensors file, or a program (.onnx), which computes on the CPU.
        weights_of: "best" or "final", of a run folder.
        device: where it computes, as "cuda".
        trust_code: import and call the code that the file names, as --model package.module:factory did.

    Raises:
        UserError: for a missing or damaged file, one that does not say what it is, and code that nobody trusts.
    """
    path = weights_file(run, weights_of)
    require_usable(path, trust_code)
    if path.suffix == ".onnx":
        return programs.load(path)
    card = Card.read(path)
    configure(card.precision, torch.device(device))
    model = models.build(card.model, in_channels=card.shape[0], num_classes=len(card.classes), image_size=card.side)
    weights.load(model, path)
    return Classifier(model, card).to(device)


def weights_file(run: str | Path, weights_of: str) -> Path:
    """The weights that a run folder's name, or a file's, means."""
    path = Path(run)
    return path / "weights" / f"{weights_of}.safetensors" if path.is_dir() else path


def require_usable(path: Path, trust_code: bool) -> None:
    """Raise UserError for a file that is not there or says nothing of itself, and where reading it may run code."""
    weights.require_there(path)
    if path.suffix == ".onnx":
        return
    model = Card.read(path).model
    if ":" in model and not trust_code:
        remedy = "If you trust whoever made it, give --trust-code (in Python trust_code=True)."
        raise UserError(f"{path} names code that this would run: model {model}", remedy)
