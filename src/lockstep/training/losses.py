"""What a loss returns, as a sum over samples and what that sum is divided by.

The pieces of a batch pass one by one, on several ranks, so a mean over a piece says little: class weights and ignored
labels divide by what the whole batch holds of them. Such a loss is taken apart here into numerator and denominator,
which are added over all pieces and ranks; the division comes once, after the gradients' sum, and nothing waits for it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UserError

# (outputs, labels of b samples) -> the mean over them; or each sample's loss; or a numerator and a denominator
Loss = Callable[[Any, Tensor], Tensor | tuple[Tensor, Tensor]]
# a scalar and what to divide its sum by; None: the scalar is a mean over the samples
Terms = tuple[Tensor, Tensor | None]

_WEIGHTED = {F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss}
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; others are of half precision


def terms_of(loss: Loss | str) -> Callable[[Any, Tensor], Terms]:
    """What a loss gives for a piece, as a scalar and what its sum is divided by.

    Args:
        loss: one of torch's modules or its name ("BCEWithLogitsLoss"), or a function.

    Raises:
        UserError: for an unknown name, and for a module that adds up instead of averaging.
    """
    if isinstance(loss, str):
        kind = getattr(nn, loss, None)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module) and loss.endswith("Loss")):
            raise UserError(
                f"unknown loss {loss!r}", "Name one of torch.nn's, as CrossEntropyLoss, or pass a function."
            )
        return terms_of(kind())
    if isinstance(loss, partial) and loss.func in _WEIGHTED and not loss.args:
        return terms_of(_WEIGHTED[loss.func](**loss.keywords))
    if getattr(loss, "reduction", None) == "sum":
        raise UserError(
            f'{type(loss).__name__}(reduction="sum") grows with the batch, and so would the step',
            'Use reduction="mean", or "none" for the losses of the samples.',
        )
    if type(loss) in _WEIGHTED.values() and getattr(loss, "reduction", None) == "mean":
        return partial(_weighted, loss)
    return partial(_any, loss)


def _weighted(loss: Any, outputs: Tensor, labels: Tensor) -> Terms:
    """Cross-entropy as torch averages it: over the weights of the classes of what is not ignored."""
    if labels.is_floating_point():  # of each class a probability: then it is the plain mean over the samples
        return loss(outputs, labels), None
    options = {"weight": loss.weight, "ignore_index": loss.ignore_index, "reduction": "sum"}
    if isinstance(loss, nn.CrossEntropyLoss):
        summed = F.cross_entropy(outputs, labels, label_smoothing=loss.label_smoothing, **options)
    else:
        summed = F.nll_loss(outputs, labels, **options)
    counts = labels != loss.ignore_index
    if loss.weight is None:
        return summed, counts.sum(dtype=torch.int64)
    weights = loss.weight[torch.where(counts, labels, 0)]
    weights = weights if weights.device.type == "mps" else weights.double()
    return summed, torch.where(counts, weights, 0.0).sum()


def _any(loss: Loss, outputs: Any, labels: Tensor) -> Terms:
    value = loss(outputs, labels)
    if isinstance(value, tuple | list) and len(value) == 2:
        numerator, denominator = value
        return numerator.sum(), torch.as_tensor(denominator, device=numerator.device).detach().sum()
    if not isinstance(value, Tensor):
        raise UserError(
            f"the loss returned a {type(value).__name__}",
            "Return a mean over the samples, each sample's loss, or a (numerator, denominator) pair of tensors.",
        )
    return (value if value.ndim == 0 else value.mean()), None


def cross_entropy(label_smoothing: float) -> Loss:
    """The usual loss of the command line's runs, of class numbers or soft labels."""

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        outputs = require_logits(outputs)
        if labels.is_floating_point():  # of each class a probability; outputs may be of half precision
            wide = torch.promote_types(outputs.dtype, labels.dtype)
            outputs, labels = outputs.to(wide), labels.to(wide)
        return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing)

    return loss


def require_logits(outputs: Any) -> Tensor:
    """A model's outputs; raises UserError where they are anything but one tensor."""
    if isinstance(outputs, Tensor):
        return outputs
    several = f" of {len(outputs)}" if isinstance(outputs, tuple | list) else ""
    raise UserError(
        f"the model returned a {type(outputs).__name__}{several}, and the loss takes one tensor [b, classes]",
        "Return the logits alone, as by a module around the model that picks them out.",
    )


@torch.no_grad()
def require_mean(terms: Callable[[Any, Tensor], Terms], outputs: Any, labels: Tensor) -> None:
    """Raise UserError for a loss that is not its samples' mean: that of a piece is then not that of its two parts.

    What is computed from outputs that can't be cut, or at random, is taken on trust. It waits for the device.
    """
    whole, denominator = terms(outputs, labels)
    if denominator is not None or not isinstance(outputs, Tensor) or len(outputs) != len(labels):
        return
    value, again, n = float(whole), float(terms(outputs, labels)[0]), len(labels)
    if value != again:  # at random, or not a number
        return
    for k in sorted({1, n // 2}):
        first, rest = (float(terms(outputs[rows], labels[rows])[0]) for rows in (slice(k), slice(k, n)))
        mean = (first * k + rest * (n - k)) / n
        size = abs(value) + (abs(first) * k + abs(rest) * (n - k)) / n
        if not abs(mean - value) <= _TOLERANCE.get(whole.dtype, 3e-2) * size:
            raise UserError(
                f"the loss is not the mean over its samples: {n} samples have {value:.6g}, the first {k} of them "
                f"{first:.6g} and the others {rest:.6g}, and so it would depend on how a batch is cut",
                'Return each sample\'s loss (reduction="none") or a (numerator, denominator) pair, whose sums over the '
                "batch are divided; or pass torch's own loss module as it is.",
            )
