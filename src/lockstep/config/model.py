"""Which network is trained."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.config.fields import Names, require

# written out, because importing the models costs seconds and help should not; a test holds the two equal
_MODEL_HELP = (
    "Ours: digits_net, lenet5, mlp, mnist_net, resnet18_cifar, resnet34_cifar, resnet50_cifar, resnet101_cifar, "
    "resnet152_cifar, speed_net; any of torchvision's (resnet18, vit_b_16, ...) or timm's; or package.module:factory."
)


@dataclass(frozen=True)
class ModelConfig:
    """Which network, and in which form it runs."""

    model: Annotated[str, arg(help=_MODEL_HELP)] = "digits_net"
    init: Annotated[str, arg(help_behavior_hint="(default: random, by --seed)")] = ""
    """Start from these weights: pretrained or pretrained:TAG, torchvision's or timm's for --model with a new head (a
    model's tag as resnet18.a1_in1k asks for them too), or a file or its folder: safetensors, or a state_dict."""
    adapt_init: bool = False
    """Take all of --init but a last layer for other classes, and its first convolution for grey or colour images."""
    freeze: Annotated[Names, arg(help_behavior_hint="(default: none)")] = ()
    """Layers or parameters that are not trained, by name or pattern: conv1,layer[12]. Their batch norms keep their
    statistics."""
    freeze_until: Annotated[str, arg(help_behavior_hint="(default: none)")] = ""
    """Train from this layer on: what the model lists before it is frozen."""
    unfreeze_at: Annotated[Names, arg(help_behavior_hint="(default: never)")] = ()
    """Train frozen layers after so many epochs: 2:layer4,4:all."""
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

        for each in self.unfreeze_at:
            require(
                re.fullmatch(r"[1-9]\d*:.+", each) is not None,
                f"--unfreeze-at {each} is not of the form EPOCHS:LAYER",
                "Give the epochs that are over before it is trained, as 2:layer4,4:all.",
            )
        require(
            not self.unfreeze_at or bool(self.freeze or self.freeze_until),
            f"--unfreeze-at {','.join(self.unfreeze_at)} where nothing is frozen",
            "Freeze layers by --freeze or --freeze-until, or leave it out.",
        )

    @property
    def unfreezing(self) -> tuple[tuple[int, str], ...]:
        """(epochs, pattern) of --unfreeze-at, in the order of the epochs."""
        parts = [each.partition(":") for each in self.unfreeze_at]
        return tuple(sorted((int(epochs), pattern) for epochs, _, pattern in parts))

    @property
    def group(self) -> int:
        """SAMPLES of groups:SAMPLES, else 0."""
        return int(self.batch_norm.partition(":")[2] or 0)
