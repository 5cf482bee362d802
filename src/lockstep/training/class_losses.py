"""The losses of the command line's runs: cross-entropy, binary cross-entropy and focal loss, with weights of classes.

Each takes class numbers or soft labels, as of mixed images. With weights a loss is the weighted sum over the weights of
the *global* batch: numerator and denominator are added over pieces and ranks (see losses.py), and divided once.

Focal loss: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, over a softmax. Effective numbers: Cui et
al., "Class-Balanced Loss Based on Effective Number of Samples", CVPR 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.config import OptimConfig
from lockstep.data.balance import labels_of
from lockstep.data.label_sets import members, table_on
from lockstep.data.loaders import TrainLoader
from lockstep.errors import UserError
from lockstep.training.losses import Loss, cross_entropy, require_logits

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
    """

    kind: str
    gamma: float = 0.0
    smoothing: float = 0.0
    weights: Tensor | None = None
    sets: Tensor | None = None

    def __call__(self, outputs: Any, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The mean over the samples, or with weights a numerator and a denominator."""
        logits = require_logits(outputs)
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
        return losses.sum(), (soft * weights).sum(dtype=None if logits.device.type == "mps" else torch.float64)


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
    sets = table_on(train.images, train.world.device)
    if sets is not None and kind != "bce":
        raise UserError(
            f"the pictures of {train.images.name} have several labels each, and --loss {optim.loss} takes one",
            "Use --loss bce: each class against all others.",
        )
    if kind == "cross-entropy" and optim.class_weights == "none":
        return cross_entropy(optim.label_smoothing), []
    weights, images, members = None, train.images, train.order.members()
    if optim.class_weights != "none":
        labels = labels_of(images, f"--class-weights {optim.class_weights}")
        labels = labels if members is None else labels[members]
        weights = class_weights(optim.class_weights, labels, images.classes)
    device = torch.device("cpu") if train.world.device.type == "mps" else train.world.device  # MPS has no float64
    table = None if weights is None else torch.from_numpy(weights).to(device)
    if table is not None and train.world.device.type == "mps":
        table = table.float().to(train.world.device)
    loss = ClassLoss(kind, float(gamma or 2), optim.label_smoothing, table, sets)
    return loss, [] if weights is None else [_told(weights, images.classes)]


def _told(weights: np.ndarray, classes: Sequence[str]) -> str:
    order = np.argsort(-weights, kind="stable")
    shown = order if len(order) <= _SHOWN else np.concatenate([order[: _SHOWN // 2], order[-_SHOWN // 2 :]])
    parts = [f"{classes[i]} {weights[i]:.3g}" for i in shown]
    if len(order) > _SHOWN:
        parts.insert(_SHOWN // 2, "...")
    return f"class weights: {', '.join(parts)}"
