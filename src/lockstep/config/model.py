"""Which network is trained."""

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.conflicts import check
from lockstep.config.fields import Arg, Names

_Layers = Annotated[Names, Arg(unset="none")]


@dataclass(frozen=True)
class ModelConfig:
    """Which network, and in which form it runs."""

    model: str = "digits_net"
    """Network; of this package, torchvision or timm, or your own. Ours: digits_net, mlp, mnist_net, resnet18_cifar,
    resnet34_cifar, resnet50_cifar, resnet101_cifar, resnet152_cifar, speed_net; any of torchvision's
    (resnet18, vit_b_16, ...) or timm's; or package.module:factory."""
    init: Annotated[str, Arg(same=(("none", ""), ("no", ""), ("random", "")), unset="random, by --seed")] = ""
    """Weights to begin with: pretrained, a file, or none. pretrained or pretrained:TAG: torchvision's or timm's for
    --model with a new head (a model's tag as resnet18.a1_in1k asks for them too); a file or its folder: safetensors, or
    a state_dict."""
    adapt_init: bool = False
    """Take all of --init but a last layer for other classes, and its first convolution for grey or colour images."""
    freeze: _Layers = ()
    """Layers or parameters that are not trained, by name or pattern: conv1,layer[12]. Their batch norms keep their
    statistics."""
    freeze_until: Annotated[str, Arg(unset="none")] = ""
    """Train from this layer on: what the model lists before it is frozen."""
    batch_norm: Annotated[
        str,
        Arg(
            form=r"auto|global|local|groups:[1-9]\d*", takes="one of auto, global, local, groups:SAMPLES (as groups:32)"
        ),
    ] = "auto"
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
        check(self)

    @property
    def group(self) -> int:
        """SAMPLES of groups:SAMPLES, else 0."""
        return int(self.batch_norm.partition(":")[2] or 0)
