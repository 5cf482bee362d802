"""How the weights move, what a slow link changes of it, which weights are the best, and when a run ends early."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.conflicts import check
from lockstep.config.fields import Arg, Count, Floats, require
from lockstep.errors import unknown

OPTIMIZERS = ("sgd", "adam", "adamw", "adadelta", "muon-sgd")
ScheduleName = Literal["constant", "linear", "step", "multistep", "cosine", "one-cycle"]
_Positive = Annotated[float, Arg(above=0)]
_AtLeast0 = Annotated[float, Arg(least=0)]
_Below1 = Annotated[float, Arg(least=0, below=1)]


@dataclass(frozen=True)
class OptimConfig:
    """How the weights move."""

    optimizer: str = "sgd"
    """sgd, adam, adamw, adadelta, timm:NAME and others. muon-sgd is that of cifar10-speed, Muon for filters and SGD for
    the rest; timm:NAME as timm:lamb, where timm is installed; or package.module:factory."""
    lr: _Positive = 0.1
    """Peak learning rate. It is for batches of --base-batch-size."""
    momentum: _Below1 = 0.9
    """Momentum of SGD and Muon."""
    nesterov: bool = False
    """Nesterov momentum (SGD)."""
    weight_decay: _AtLeast0 = 0.0
    """Weight decay. Of which parameters, --decay-norms says."""
    decay_norms: Literal["auto", "yes", "no"] = "auto"
    """Whether norms and biases are decayed as well (auto: not by adamw)."""
    layer_decay: Annotated[float, Arg(above=0, most=1)] = 1.0
    """Multiply the rate by this for each block that a layer lies before the head (1: off)."""
    head_lr: _AtLeast0 = 0.0
    """Peak learning rate of the last layer, as a new head for other classes (0: --lr)."""
    schedule: ScheduleName = "cosine"
    """How the rate falls: cosine, step, one-cycle and others."""
    warmup_epochs: _AtLeast0 = 0.0
    """Rise linearly from 1 % of the rate over this many epochs first."""
    step_epochs: _Positive = 1.0
    """Epochs between two drops (step)."""
    milestones: Annotated[Floats, Arg(unset="none")] = ()
    """Epochs after which the rate drops (multistep)."""
    gamma: _Positive = 0.1
    """Factor of a drop (step, multistep)."""
    scale_lr: Literal["linear", "sqrt", "none"] = "none"
    """Scale the rate with --batch-size / --base-batch-size, or with its square root."""
    base_batch_size: Count = 0
    """The batch size that --lr was chosen for (0: unknown; --scale-lr needs it)."""
    clip_norm: _AtLeast0 = 0.0
    """Clip the global gradient norm to this (0: off)."""
    loss: Annotated[
        str,
        Arg(
            form=r"cross-entropy|bce|focal(:\d+(\.\d*)?)?", takes="one of cross-entropy, bce, focal:GAMMA (as focal:2)"
        ),
    ] = "cross-entropy"
    """cross-entropy, bce (each class against all others) or focal:GAMMA (right ones count less; focal is focal:2)."""
    class_weights: str = "none"
    """Weigh samples by their class: auto (1 / its count), effective:BETA (as effective:0.999), or w1,w2,... (none)."""
    label_smoothing: _Below1 = 0.0
    """Label smoothing of the loss."""
    ema: _Below1 = 0.0
    """Decay of an exponential moving average of the weights, which is then what is evaluated (0: off)."""
    ema_warmup: bool = False
    """Begin the average with a smaller decay: min(--ema, (1 + t) / (10 + t)) at its update t."""

    def __post_init__(self) -> None:
        check(self)
        if self.optimizer not in OPTIMIZERS and ":" not in self.optimizer:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS, "Your own is package.module:factory.")
        require(
            _are_weights(self.class_weights),
            f"--class-weights {self.class_weights} are none",
            "Use auto, effective:BETA with a BETA between 0 and 1, or positive weights, as 1,2.5,10 for three classes.",
        )

    @property
    def spares_norms(self) -> bool:
        """True where weight decay leaves norms and biases alone."""
        return self.decay_norms == "no" or (self.decay_norms == "auto" and self.optimizer == "adamw")


def _are_weights(text: str) -> bool:
    kind, _, rest = text.partition(":")
    try:
        values = [float(value) for value in (rest if kind == "effective" else text).split(",")]
    except ValueError:
        return text in ("none", "auto")
    if kind == "effective":
        return len(values) == 1 and 0 < values[0] < 1
    return all(value > 0 and math.isfinite(value) for value in values)


@dataclass(frozen=True)
class CommConfig:
    """For links where the all-reduce takes longer than the step: send less. See docs/slow-links.md."""

    compress: Literal["none", "fp16", "bf16"] = "none"
    """The type in which DDP sends gradients (none: their own)."""

    def __post_init__(self) -> None:
        check(self)


Metric = Literal[
    "top1",
    "top5",
    "loss",
    "macro-f1",
    "macro-precision",
    "macro-recall",
    "balanced-accuracy",
    "map",
    "calibration-error",
]
SMALLER_IS_BETTER = ("loss", "calibration-error")


@dataclass(frozen=True)
class SelectionConfig:
    """Which weights are kept as the best, and when the run ends before its last epoch."""

    keep_best: Metric = "top1"
    """What weights/best.safetensors is the best by; loss and calibration-error: the smallest, the others: the largest.
    balanced-accuracy is macro-recall; map: the mean average precision of several labels a picture."""
    patience: Count = 0
    """End after so many evaluations without a better. Better is by --keep-best (0: off); the schedule is that of all
    epochs."""
    min_delta: _AtLeast0 = 0.0
    """What is better by less than this does not count for --patience."""

    def __post_init__(self) -> None:
        check(self)
