"""How the weights move."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.config.fields import Floats, require, require_finite
from lockstep.errors import unknown

OPTIMIZERS = ("sgd", "adam", "adamw", "adadelta", "muon", "muon-sgd")
ScheduleName = Literal[
    "constant", "linear", "step", "multistep", "cosine", "one-cycle", "timm:cosine", "timm:tanh", "timm:poly"
]


@dataclass(frozen=True)
class OptimConfig:
    """How the weights move."""

    optimizer: str = "sgd"
    """sgd, adam, adamw, adadelta, muon (matrices and convolutions; AdamW for the rest), muon-sgd (cifar10-speed's: Muon
    for filters, SGD for the rest), timm:NAME (as timm:lamb, where timm is installed), or package.module:factory."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 0.1
    """Peak learning rate, meant for batches of --base-batch-size."""
    momentum: float = 0.9
    """Momentum of SGD and Muon."""
    nesterov: bool = False
    """Nesterov momentum (SGD)."""
    weight_decay: float = 0.0
    """Weight decay; of which parameters, --decay-norms says."""
    decay_norms: Literal["auto", "yes", "no"] = "auto"
    """Whether norms and biases are decayed as well (auto: not by adamw and muon)."""
    layer_decay: float = 1.0
    """Multiply the rate by this for each block that a layer lies before the head (1: off)."""
    head_lr: float = 0.0
    """Peak learning rate of the last layer, as a new head for other classes (0: --lr)."""
    schedule: ScheduleName = "cosine"
    """Course of the learning rate over the run; timm's (poly: with --gamma as its power) where timm is installed."""
    warmup_epochs: float = 0.0
    """Rise linearly from 1 % of the rate over this many epochs first."""
    step_epochs: float = 1.0
    """Epochs between two drops (step)."""
    milestones: Annotated[Floats, arg(help_behavior_hint="(default: none)")] = ()
    """Epochs after which the rate drops (multistep)."""
    gamma: float = 0.1
    """Factor of a drop (step, multistep); power (timm:poly)."""
    scale_lr: Literal["linear", "sqrt", "none"] = "none"
    """Scale the rate with --batch-size / --base-batch-size, or with its square root."""
    base_batch_size: int = 0
    """The batch size that --lr is meant for (0: unknown; --scale-lr needs it)."""
    clip_norm: float = 0.0
    """Clip the global gradient norm to this (0: off)."""
    loss: str = "cross-entropy"
    """cross-entropy, bce (each class against all others) or focal:GAMMA (right ones count less; focal is focal:2)."""
    class_weights: str = "none"
    """Weigh samples by their class: auto (1 / its count), effective:BETA (as effective:0.999), or w1,w2,... (none)."""
    label_smoothing: float = 0.0
    """Label smoothing of the loss."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which is then what is evaluated (0: off)."""
    ema_warmup: bool = False
    """Begin the average with a smaller decay: min(--ema, (1 + t) / (10 + t)) at its update t."""

    def __post_init__(self) -> None:
        require_finite(self)
        if self.optimizer not in OPTIMIZERS and ":" not in self.optimizer:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS, "Your own is package.module:factory.")
        require(
            re.fullmatch(r"cross-entropy|bce|focal(:\d+(\.\d*)?)?", self.loss) is not None,
            f"--loss {self.loss} is unknown",
            "Use cross-entropy, bce, or focal:GAMMA, as focal:2.",
        )
        require(
            _are_weights(self.class_weights),
            f"--class-weights {self.class_weights} are none",
            "Use auto, effective:BETA with a BETA between 0 and 1, or positive weights, as 1,2.5,10 for three classes.",
        )
        require(self.lr > 0, f"--lr {self.lr} is not positive", "Give a positive learning rate, as 0.1.")
        require(self.warmup_epochs >= 0, f"--warmup-epochs {self.warmup_epochs} is negative", "Use 0 for none.")
        require(self.step_epochs > 0, f"--step-epochs {self.step_epochs} is not positive", "Give epochs, as 1.")
        require(0 <= self.momentum < 1, f"--momentum {self.momentum} is not in [0, 1)", "A usual momentum is 0.9.")
        require(self.weight_decay >= 0, f"--weight-decay {self.weight_decay} is negative", "Use 0 to turn it off.")
        require(
            0 < self.layer_decay <= 1,
            f"--layer-decay {self.layer_decay} is not in (0, 1]",
            "Usual values are 0.65 to 0.9; 1 turns it off.",
        )
        require(self.head_lr >= 0, f"--head-lr {self.head_lr} is negative", "Give a rate, or 0 for that of --lr.")
        of_its_own = {
            "--layer-decay": self.layer_decay < 1,
            "--head-lr": self.head_lr,
            "--decay-norms no": self.decay_norms == "no",
        }
        for flag, on in of_its_own.items():
            require(
                not on or self.optimizer.startswith("timm:") or self.optimizer in set(OPTIMIZERS) - {"muon-sgd"},
                f"{flag} with --optimizer {self.optimizer}, which makes its groups and their rates by itself",
                "Leave one of the two out.",
            )
        require(self.gamma > 0, f"--gamma {self.gamma} is not positive", "Give the factor of a drop, as 0.1.")
        require(self.base_batch_size >= 0, f"--base-batch-size {self.base_batch_size} is negative", "Use 0 for none.")
        require(
            self.schedule != "multistep" or bool(self.milestones),
            "--schedule multistep without --milestones never drops",
            "Give the epochs of the drops, as --milestones 100,150, or use --schedule constant.",
        )
        require(
            0 <= self.label_smoothing < 1,
            f"--label-smoothing {self.label_smoothing} is not in [0, 1)",
            "Use 0 to turn it off; a usual value is 0.1.",
        )
        require(0 <= self.ema < 1, f"--ema {self.ema} is not in [0, 1)", "A usual decay is 0.999.")
        require(
            self.ema > 0 or not self.ema_warmup, "--ema-warmup without --ema warms up nothing", "Give --ema 0.999 too."
        )
        require(self.clip_norm >= 0, f"--clip-norm {self.clip_norm} is negative", "Use 0 to turn clipping off.")
        require(
            not self.nesterov or (self.optimizer == "sgd" and self.momentum > 0),
            "--nesterov needs --optimizer sgd with a positive --momentum",
            "Drop --nesterov (or add --no-nesterov, where the recipe has it).",
        )

    @property
    def spares_norms(self) -> bool:
        """True where weight decay leaves norms and biases alone."""
        return self.decay_norms == "no" or (self.decay_norms == "auto" and self.optimizer in ("adamw", "muon"))


def _are_weights(text: str) -> bool:
    kind, _, rest = text.partition(":")
    try:
        values = [float(value) for value in (rest if kind == "effective" else text).split(",")]
    except ValueError:
        return text in ("none", "auto")
    if kind == "effective":
        return len(values) == 1 and 0 < values[0] < 1
    return all(value > 0 and math.isfinite(value) for value in values)
