"""A classifier as a program that runs without its Python code: torch.export's, and ONNX."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.checkpoint.card import Card
from lockstep.errors import UserError
from lockstep.inference.classifier import Classifier

# Largest difference of two logits over the largest logit: float32 has 6e-8 an operation, and a deep network rounds some
# thousand times; a wrong operator or a forgotten mode is off by 1e-2 and more.
BOUND = 1e-4
_CARD = "lockstep"  # where an archive of torch.export keeps it
_TRACED = 2  # images of the batch that is traced: 1 would be taken for a constant
ENDINGS = (".onnx", ".pt2")
_INSTALL = "pip install 'lockstep-torch[onnx]'"


def save(classifier: Classifier, path: Path, form: str) -> None:
    """Write the classifier's forward pass in float32 as a program, "pt2" or "onnx", for any number of images.

    Input `images`, float32 [b, C, H, W], normalised as `Classifier.transform` does; output `logits` [b, classes].

    Raises:
        UserError: where a model can't be written so, or a package is missing.
    """
    card = replace(classifier.card, precision="fp32", tta="none")  # several views of an image are part of the program
    plain = Classifier(classifier.model, replace(classifier.card, precision="fp32"))
    side = card.side
    images = torch.zeros(_TRACED, card.shape[0], side, side)
    traced = {"images": {0: torch.export.Dim("batch")}}
    try:
        with _quiet():
            if form == "pt2":
                program = torch.export.export(plain, (images,), dynamic_shapes=traced)
                torch.export.save(program, path, extra_files={_CARD: json.dumps(card.to_metadata())})
            else:
                _save_onnx(plain, images, traced, path, card)
    except ImportError as error:
        raise UserError(f"--to onnx needs {error.name}, which is not installed", _INSTALL) from error
    except (OSError, UserError):
        raise
    except Exception as error:  # what a tracer can't follow ends in errors of any type
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{card.model} can't be written as {form}: {first}", "Export the weights: --to safetensors."
        ) from error


def _save_onnx(
    plain: Classifier, images: Tensor, traced: dict[str, dict[int, "torch.export.Dim"]], path: Path, card: Card
) -> None:
    written = torch.onnx.export(
        plain,
        (images,),
        dynamo=True,
        dynamic_shapes=traced,
        input_names=["images"],
        output_names=["logits"],
        verbose=False,
    )
    assert written is not None
    written.model.metadata_props.update(card.to_metadata())
    written.save(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """The tracers tell on standard error what they do."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class Program(nn.Module):
    """A function from images to logits as a module without parameters; it runs on the CPU."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images float32 [b, C, H, W]."""
        return self.run(images.cpu()).to(images.device)


def load(path: Path) -> Classifier:
    """The classifier in a program that `save` wrote. A .pt2 may run code as it is read.

    Raises:
        UserError: for a damaged file, or one that says nothing of itself.
    """
    if path.suffix == ".onnx":
        return _load_onnx(path)
    extra = {_CARD: ""}
    try:
        with _quiet():
            program = torch.export.load(path, extra_files=extra).module()
    except Exception as error:  # a damaged archive ends in errors of any type
        raise UserError(f"{path} can't be read: {_first_line(error)}", "Export it again.") from error

    def run(images: Tensor) -> Tensor:  # not the module itself, which would be registered, and can't be set to eval()
        logits: Tensor = program(images)
        return logits

    return Classifier(Program(run), Card.from_metadata(json.loads(extra[_CARD] or "{}"), str(path)))


def _load_onnx(path: Path) -> Classifier:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"{path} needs onnxruntime, which is not installed", _INSTALL) from error
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own types have no common one
        raise UserError(f"{path} can't be read: {_first_line(error)}", "Export it again.") from error
    card = Card.from_metadata(session.get_modelmeta().custom_metadata_map, str(path))

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return Classifier(Program(run), card)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def largest_difference(program: Classifier, classifier: Classifier, images: Tensor) -> tuple[float, float]:
    """Largest difference of the logits of normalised images [b, C, H, W], and the largest logit itself.

    Each is asked for all images at once and for the first alone: a program may have kept the size that was traced.
    """
    plain = Classifier(classifier.model, replace(classifier.card, precision="fp32"))
    worst = largest = 0.0
    with torch.no_grad():
        for batch in (images, images[:1]):
            wanted = plain(batch)
            worst = max(worst, float((program(batch) - wanted).abs().max()))
            largest = max(largest, float(wanted.abs().max()))
    return worst, largest
