"""What is learned: data, model, optimization, and what a slow link makes of it. Each field decides the result."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.config.fields import Floats, require, require_at_least, require_finite
from lockstep.errors import unknown

OPTIMIZERS = ("sgd", "adam", "adamw", "adadelta", "muon", "muon-sgd")
ScheduleName = Literal["constant", "linear", "step", "multistep", "cosine", "one-cycle"]

# written out, because importing the models costs seconds and help should not; a test holds the two equal
_MODEL_HELP = (
    "Ours: digits_net, lenet5, mlp, mnist_net, resnet18_cifar, resnet34_cifar, resnet50_cifar, resnet101_cifar, "
    "resnet152_cifar, speed_net; any of torchvision's (resnet18, vit_b_16, ...) or timm's; or package.module:factory."
)


_LARGEST_SIDE = 8192  # pixels


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how the training set is augmented."""

    dataset: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, folder, or package.module:factory."""
    fraction: float = 1.0
    """Train on this part of the set: a random subset by --seed, the same on any number of processes."""
    crop_padding: int = 0
    """Pad by this many pixels and crop at random (0: off)."""
    crop_fill: Literal["zero", "reflect"] = "zero"
    """What the padding holds: black, or the image mirrored at its edge."""
    flip: bool = False
    """Flip half of the images left to right."""
    alternate_flip: bool = False
    """Flip each image in every second epoch instead of at random; one half begins flipped, the other not."""
    cutout: int = 0
    """Blank a random square of this side, in pixels (0: off)."""
    resized_crop: bool = False
    """Train on random crops of random scale and aspect (image folders)."""
    image_size: int = 0
    """Side of the images that the model sees, in pixels (0: as stored)."""
    drop_last: bool = False
    """Leave out the short last batch of an epoch."""
    follow_links: bool = False
    """Follow links that lead out of the class folders."""

    def __post_init__(self) -> None:
        require(
            0 < self.fraction <= 1,
            f"--fraction {self.fraction} is not in (0, 1]",
            "Give the part of the training set to use, as 0.25.",
        )
        require_at_least(0, self, "crop_padding", "cutout", "image_size")
        for name in ("crop_padding", "cutout", "image_size"):
            value, flag = getattr(self, name), name.replace("_", "-")
            require(value <= _LARGEST_SIDE, f"--{flag} {value} is too large", f"Use {_LARGEST_SIDE:,} at most.")


@dataclass(frozen=True)
class ModelConfig:
    """Which network, and in which form it runs."""

    model: Annotated[str, arg(help=_MODEL_HELP)] = "digits_net"
    init: Annotated[str, arg(help_behavior_hint="(default: random, by --seed)")] = ""
    """Start from these weights: a safetensors file, or a state_dict by torch.save, with or without `module.`."""
    adapt_init: bool = False
    """Take all of --init but a last layer for other classes, and its first convolution for grey or colour images."""
    batch_norm: str = "auto"
    """Statistics over the micro-batch on all processes (global; auto: that, where ranks step together), over each
    process's own part of it (local), or over so many samples that follow each other in the batch (groups:32)."""
    channels_last: bool = False
    """Keep images as NHWC in memory: faster convolutions on most hardware."""
    compile: bool = False
    """Compile the model with torch.compile."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """How --compile goes about it: reduce-overhead replays CUDA graphs, max-autotune tries many kernels as well."""
    find_unused_parameters: bool = False
    """Let DDP accept parameters that take no part in the loss (costs a graph walk a step)."""

    activation_checkpointing: bool = False
    """Keep a block's input alone, and compute its insides again in the backward pass: less memory, a forward more."""

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"auto|global|local|groups:[1-9]\d*", self.batch_norm) is not None,
            f"--batch-norm {self.batch_norm} is unknown",
            "Use auto, global, local, or groups:SAMPLES, as groups:32.",
        )

    @property
    def group(self) -> int:
        """SAMPLES of groups:SAMPLES, else 0."""
        return int(self.batch_norm.partition(":")[2] or 0)


@dataclass(frozen=True)
class OptimConfig:
    """How the weights move."""

    optimizer: str = "sgd"
    """sgd, adam, adamw, adadelta, muon (matrices and convolutions; AdamW for the rest), muon-sgd (cifar10-speed's: Muon
    for filters, SGD for the rest), or package.module:factory."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 0.1
    """Peak learning rate, meant for batches of --base-batch-size."""
    momentum: float = 0.9
    """Momentum of SGD and Muon."""
    nesterov: bool = False
    """Nesterov momentum (SGD)."""
    weight_decay: float = 0.0
    """Weight decay, applied to every parameter."""
    schedule: ScheduleName = "cosine"
    """Course of the learning rate over the run."""
    warmup_epochs: float = 0.0
    """Rise linearly from 1 % of the rate over this many epochs first."""
    step_epochs: float = 1.0
    """Epochs between two drops (step)."""
    milestones: Annotated[Floats, arg(help_behavior_hint="(default: none)")] = ()
    """Epochs after which the rate drops (multistep)."""
    gamma: float = 0.1
    """Factor of a drop (step, multistep)."""
    scale_lr: Literal["linear", "sqrt", "none"] = "none"
    """Scale the rate with --batch-size / --base-batch-size, or with its square root."""
    base_batch_size: int = 0
    """The batch size that --lr is meant for (0: unknown; --scale-lr needs it)."""
    clip_norm: float = 0.0
    """Clip the global gradient norm to this (0: off)."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which is then what is evaluated (0: off)."""

    def __post_init__(self) -> None:
        require_finite(self)
        if self.optimizer not in OPTIMIZERS and ":" not in self.optimizer:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS, "Your own is package.module:factory.")
        require(self.lr > 0, f"--lr {self.lr} is not positive", "Give a positive learning rate, as 0.1.")
        require(self.warmup_epochs >= 0, f"--warmup-epochs {self.warmup_epochs} is negative", "Use 0 for none.")
        require(self.step_epochs > 0, f"--step-epochs {self.step_epochs} is not positive", "Give epochs, as 1.")
        require(0 <= self.momentum < 1, f"--momentum {self.momentum} is not in [0, 1)", "A usual momentum is 0.9.")
        require(self.weight_decay >= 0, f"--weight-decay {self.weight_decay} is negative", "Use 0 to turn it off.")
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
        require(self.clip_norm >= 0, f"--clip-norm {self.clip_norm} is negative", "Use 0 to turn clipping off.")
        require(
            not self.nesterov or (self.optimizer == "sgd" and self.momentum > 0),
            "--nesterov needs --optimizer sgd with a positive --momentum",
            "Drop --nesterov (or add --no-nesterov, where the recipe has it).",
        )


@dataclass(frozen=True)
class LinkConfig:
    """For links where the all-reduce takes longer than the step: send less, or less often. See docs/slow-links.md."""

    compress: str = "none"
    """What DDP sends of a gradient: none (all), fp16, bf16, or powersgd:RANK (a product of two thin matrices)."""
    sync_every: int = 1
    """Local SGD: each process takes so many steps alone, then their weights are averaged (1: plain DDP)."""
    outer_lr: float = 1.0
    """With --sync-every: how far to go from the last common weights to the average; DiLoCo uses 0.7."""
    outer_momentum: float = 0.0
    """With --sync-every: Nesterov momentum of these outer steps; DiLoCo uses 0.9."""
    inner_state: Literal["averaged", "private"] = "averaged"
    """With --sync-every: the optimizer's state between two averagings; private: each process keeps its own (DiLoCo's
    paper), which checkpoints hold for all."""

    def __post_init__(self) -> None:
        require_finite(self)
        require(
            re.fullmatch(r"none|fp16|bf16|powersgd:[1-9]\d*", self.compress) is not None,
            f"--compress {self.compress} is unknown",
            "Use none, fp16, bf16, or powersgd:RANK, as powersgd:4.",
        )
        require(self.sync_every >= 1, f"--sync-every {self.sync_every} is not positive", "Use 1 for every step.")
        require(self.outer_lr > 0, f"--outer-lr {self.outer_lr} is not positive", "Use 1 for the plain average.")
        require(
            0 <= self.outer_momentum < 1,
            f"--outer-momentum {self.outer_momentum} is not in [0, 1)",
            "Use 0 for the plain average, 0.9 for DiLoCo.",
        )
        require(
            self.sync_every > 1 or (self.outer_lr, self.outer_momentum, self.inner_state) == (1.0, 0.0, "averaged"),
            "--outer-lr, --outer-momentum and --inner-state belong to --sync-every",
            "Give --sync-every 2 or more, or leave them out.",
        )
        require(
            self.sync_every == 1 or self.compress == "none",
            f"--sync-every {self.sync_every} with --compress {self.compress}: weights are averaged, not gradients",
            "Leave one of the two out.",
        )

    @property
    def powersgd_rank(self) -> int:
        """RANK of powersgd:RANK, else 0."""
        return int(self.compress.partition(":")[2] or 0)
