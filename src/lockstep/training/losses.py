"""Losses as a sum over samples and what that sum is divided by, and those of the command line's runs.

A mean over a shard says little: class weights and ignored labels divide by what the whole batch holds of them. So
numerator and denominator are added over all shards and ranks, and the division comes once, after the gradients' sum.

Focal loss: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, over a softmax. Effective numbers: Cui et
al., "Class-Balanced Loss Based on Effective Number of Samples", CVPR 2019.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.config import OptimConfig
from lockstep.data.image_sets import members, table_on
from lockstep.data.loaders import TrainLoader
from lockstep.data.order import labels_of
from lockstep.errors import UserError, with_article

# (outputs, labels of b samples) -> the mean over them; or each sample's loss; or a numerator and a denominator
Loss = Callable[[Any, Tensor], Tensor | tuple[Tensor, Tensor]]
# a scalar and what to divide its sum by; None: the scalar is a mean over the samples
Terms = tuple[Tensor, Tensor | None]

_WEIGHTED = {F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss}
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}  # relative; others are of half precision


class RankLoss(NamedTuple):
    """What a rank adds to the loss of a step: mean losses, each a scalar on the device, of so many samples. Of a loss
    with a denominator each is a shard's part of the sum, and counts once."""

    means: Sequence[Tensor]
    samples: Sequence[int]

    def total(self) -> float:
        """Their sum over the samples, in float64, so that it does not tell in how many parts they came. It waits for
        the device."""
        return sum(float(mean) * samples for mean, samples in zip(*self, strict=True))


def terms_of(loss: Loss) -> Callable[[Any, Tensor], Terms]:
    """What a loss gives for a shard, as a scalar and what its sum is divided by. Raises UserError for a sum."""
    if not callable(loss):
        raise UserError(f"the loss is {with_article(loss)}, not a function", "Give it as nn.CrossEntropyLoss().")
    if isinstance(loss, partial) and loss.func in _WEIGHTED and not loss.args:
        return terms_of(_WEIGHTED[loss.func](**loss.keywords))
    if getattr(loss, "reduction", None) == "sum":
        raise UserError(
            f'{type(loss).__name__}(reduction="sum") grows with the batch, and so would the step',
            'Use reduction="mean", or "none" for each sample\'s loss.',
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
    weights = loss.weight[torch.where(counts, labels, 0)].double()
    return summed, torch.where(counts, weights, 0.0).sum()


def _any(loss: Loss, outputs: Any, labels: Tensor) -> Terms:
    value = loss(outputs, labels)
    if isinstance(value, tuple | list) and len(value) == 2:
        numerator, denominator = value
        return numerator.sum(), torch.as_tensor(denominator, device=numerator.device).detach().sum()
    if not isinstance(value, Tensor):
        raise UserError(
            f"the loss returned {with_article(value)}",
            "Return a mean over the samples, each sample's loss, or a (numerator, denominator) pair of tensors.",
        )
    return (value if value.ndim == 0 else value.mean()), None


def cross_entropy(label_smoothing: float, classes: int = 0) -> Loss:
    """The usual loss of the command line's runs, of class numbers or soft labels; `classes`: see `require_logits`."""

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        outputs = require_logits(outputs, classes)
        if labels.is_floating_point():  # of each class a probability; outputs may be of half precision
            wide = torch.promote_types(outputs.dtype, labels.dtype)
            outputs, labels = outputs.to(wide), labels.to(wide)
        return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing)

    return loss


def require_logits(outputs: Any, classes: int = 0) -> Tensor:
    """A model's outputs; raises UserError where they are anything but one tensor, or more than the set's classes."""
    if isinstance(outputs, Tensor):
        if 0 < classes < outputs.shape[-1]:
            raise UserError(
                f"the model has {outputs.shape[-1]} outputs, and the training set {classes} classes",
                "Give its last layer as many: a factory gets num_classes. A Dataset may name more by its `classes`.",
            )
        return outputs
    several = f" of {len(outputs)}" if isinstance(outputs, tuple | list) else ""
    raise UserError(
        f"the model returned {with_article(outputs)}{several}, and the loss takes one tensor [b, classes]",
        "Return the logits alone, as by a module around the model that picks them out.",
    )


@torch.no_grad()
def require_mean(terms: Callable[[Any, Tensor], Terms], outputs: Any, labels: Tensor) -> None:
    """Raise UserError for a loss that is not its samples' mean: that of a batch is then not that of its two parts.

    What is computed from outputs that can't be cut, or at random, is taken on trust. It waits for the device.
    An output that only happens to have as many rows as the batch is one of those.
    """
    n = len(labels)
    rows = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.ndim and len(t) == n]
    whole, denominator = terms(outputs, labels)
    if denominator is not None or not rows:
        return
    value, again = float(whole), float(terms(outputs, labels)[0])
    if value != again:  # at random, or not a number
        return
    for k in sorted({1, n // 2}):
        try:
            first, rest = (float(terms(_rows(outputs, n, part), labels[part])[0]) for part in (slice(k), slice(k, n)))
        except (IndexError, RuntimeError, ValueError):
            return
        mean = (first * k + rest * (n - k)) / n
        size = abs(value) + (abs(first) * k + abs(rest) * (n - k)) / n
        if not abs(mean - value) <= _TOLERANCE.get(whole.dtype, 3e-2) * size + torch.finfo(whole.dtype).tiny:
            if float(terms(outputs, labels)[0]) != value:  # it moves with its calls, which the self-check says
                return
            raise UserError(
                "the loss is not the mean over its samples, and so it would depend on how a batch is shared out",
                'Return each sample\'s loss (reduction="none") or a (numerator, denominator) pair, whose sums over the '
                "batch are divided; or pass torch's own loss module as it is; or, where samples are compared with each "
                "other, TrainStep(..., whole_batch=True).",
            )


def _rows(outputs: Any, count: int, part: slice) -> Any:
    """Outputs of some of the samples, nested as those of all of them are."""
    return tree_map(lambda t: t[part] if isinstance(t, Tensor) and t.ndim and len(t) == count else t, outputs)


_SHOWN = 10  # classes whose weights are listed


@dataclass(frozen=True, eq=False)
class ClassLoss:
    """A loss of outputs [b, classes] and labels, int64 [b] or soft ones [b, classes].

    Args:
        kind: "cross-entropy", "bce" (the mean over the classes, each against all others) or "focal".
        gamma: of the focal loss; how much less a sample counts that is right already.
        smoothing: of labels: so much of a label is shared out over all classes.
        weights: float64 [classes], of a sample by its class; a soft label's are those of its classes, by their parts.
        sets: bool [sets, classes] where a label means several classes, as `label_sets.table_on` gives it.
        classes: of the training set, if known: more outputs are refused.
    """

    kind: str
    gamma: float = 0.0
    smoothing: float = 0.0
    weights: Tensor | None = None
    sets: Tensor | None = None
    classes: int = 0

    def __call__(self, outputs: Any, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The mean over the samples, or with weights a numerator and a denominator."""
        logits = require_logits(outputs, self.classes)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        classes = logits.shape[1]
        soft = labels if labels.is_floating_point() else members(labels, classes, self.sets)
        soft = soft.to(logits.dtype)
        even = 1 / classes if self.sets is None else 0.5  # of each class apart: it is there or not
        target = soft * (1 - self.smoothing) + self.smoothing * even if self.smoothing else soft
        weights = None if self.weights is None else self.weights.to(logits.dtype)
        if self.kind == "bce":
            losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
            losses = losses if weights is None else losses * (soft * weights).sum(1)
        else:
            logs = logits.log_softmax(1)
            terms = target * -logs
            if self.kind == "focal":
                # of a probability of 1 to the last bit the power's slope could be infinite
                terms = terms * (-torch.expm1(logs)).clamp_min(torch.finfo(logs.dtype).tiny) ** self.gamma
            losses = (terms if weights is None else terms * weights).sum(1)
        if weights is None:
            return losses.mean()
        return losses.sum(), (soft * weights).sum(dtype=torch.float64)


def class_weights(text: str, labels: np.ndarray, classes: Sequence[str]) -> np.ndarray | None:
    """The weights that `--class-weights` asks for, float64 [classes], so that a sample's weight is 1 on average.

    Args:
        text: "none", "auto" (1 / the class's count), "effective:BETA" ((1 - beta) / (1 - beta^count)), or a weight for
            each class.
        labels: int64 [n], of the samples to be trained on.

    Raises:
        UserError: for another number of weights than of classes.
    """
    if text == "none":
        return None
    counts = np.bincount(labels, minlength=len(classes))
    kind, _, beta = text.partition(":")
    if kind == "auto":
        weights = 1 / np.maximum(counts, 1)
    elif kind == "effective":
        weights = (1 - float(beta)) / -np.expm1(np.maximum(counts, 1) * np.log(float(beta)))
    else:
        weights = np.array([float(part) for part in text.split(",")])
        if len(weights) != len(classes):
            raise UserError(
                f"--class-weights has {len(weights)} weights, and there are {len(classes)} classes",
                f"Give one for each, in this order: {', '.join(classes[:_SHOWN])}{', ...' * (len(classes) > _SHOWN)}",
            )
    return np.asarray(weights * len(labels) / (weights * counts).sum())


def loss_of(optim: OptimConfig, train: TrainLoader) -> tuple[Loss, list[str]]:
    """The loss that a config asks for on a training set, and what is to be said of it at the run's start."""
    kind, _, gamma = optim.loss.partition(":")
    sets, classes = table_on(train.images, train.world.device), len(train.images.classes)
    if sets is not None and kind != "bce":
        raise UserError(
            f"the pictures of {train.images.name} have several labels each, and --loss {optim.loss} takes one",
            "Use --loss bce: each class against all others.",
        )
    if kind == "cross-entropy" and optim.class_weights == "none":
        return cross_entropy(optim.label_smoothing, classes), []
    weights, images, used = None, train.images, train.order.members()
    if optim.class_weights != "none":
        labels = labels_of(images, f"--class-weights {optim.class_weights}")
        weights = class_weights(optim.class_weights, labels if used is None else labels[used], images.classes)
    table = None if weights is None else torch.from_numpy(weights).to(train.world.device)
    loss = ClassLoss(kind, float(gamma or 2), optim.label_smoothing, table, sets, classes)
    return loss, [] if weights is None else [_told(weights, images.classes)]


def _told(weights: np.ndarray, classes: Sequence[str]) -> str:
    order = np.argsort(-weights, kind="stable")
    shown = order if len(order) <= _SHOWN else np.concatenate([order[: _SHOWN // 2], order[-_SHOWN // 2 :]])
    parts = [f"{classes[i]} {weights[i]:.3g}" for i in shown]
    if len(order) > _SHOWN:
        parts.insert(_SHOWN // 2, "...")
    return f"class weights: {', '.join(parts)}"
