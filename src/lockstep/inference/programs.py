"""A classifier as an ONNX program, which runs without its Python code."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.checkpoint.weights import Card
from lockstep.errors import UserError, reason
from lockstep.inference.classifier import Classifier

# Largest difference of two logits over the largest logit: float32 has 6e-8 an operation, and a deep network rounds some
# thousand times; a wrong operator or a forgotten mode is off by 1e-2 and more.
BOUND = 1e-4
_TRACED = 2  # images of the batch that is traced: 1 would be taken for a constant
_INSTALL = "pip install 'lockstep-torch[onnx]'"


def save(classifier: Classifier, path: Path) -> None:
    """Write the classifier's forward pass in float32, for any number of images.

    Input `images`, float32 [b, C, H, W], normalised as `Classifier.transform` does; output `logits` [b, classes].
    Raises UserError where a model can't be written so, or a package is missing.
    """
    card = replace(classifier.card, precision="fp32", tta="none")  # several views of an image are part of the program
    images = torch.zeros(_TRACED, card.shape[0], card.side, card.side)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written = torch.onnx.export(
                _plain(classifier), (images,), dynamo=True, dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                input_names=["images"], output_names=["logits"], verbose=False,
            )  # fmt: skip
            assert written is not None
            written.model.metadata_props.update(card.to_metadata())
            written.save(path)
    except ImportError as error:
        raise UserError(f"--to onnx needs {error.name}, which is not installed", _INSTALL) from error
    except (OSError, UserError):
        raise
    except Exception as error:  # what a tracer can't follow ends in errors of any type
        message = f"{card.model} can't be written as onnx: {reason(error)}"
        raise UserError(message, "Export the weights: --to safetensors.") from error
    finally:
        logger.setLevel(level)


def _plain(classifier: Classifier) -> Classifier:
    return Classifier(classifier.model, replace(classifier.card, precision="fp32"))


class Program(nn.Module):
    """A function from images to logits as a module without parameters; it runs on the CPU."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images float32 [b, C, H, W]."""
        return self.run(images.cpu()).to(images.device)


def load(path: Path) -> Classifier:
    """The classifier in a program that `save` wrote. Raises UserError for a damaged file, or one without a card."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"{path} needs onnxruntime, which is not installed", _INSTALL) from error
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own types have no common one
        raise UserError(f"{path} can't be read: {reason(error)}", "Export it again.") from error
    card = Card.from_metadata(session.get_modelmeta().custom_metadata_map, str(path))
    return Classifier(Program(lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])), card)


def largest_difference(program: Classifier, classifier: Classifier, images: Tensor) -> tuple[float, float]:
    """Largest difference of the logits of normalised images [b, C, H, W], and the largest logit itself.

    Each is asked for all images at once and for the first alone: a program may have kept the size that was traced.
    """
    worst = largest = 0.0
    with torch.no_grad():
        for batch in (images, images[:1]):
            wanted = _plain(classifier)(batch)
            worst = max(worst, float((program(batch) - wanted).abs().max()))
            largest = max(largest, float(wanted.abs().max()))
    return worst, largest
