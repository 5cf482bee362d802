"""CIFAR-10 to 94 % in eight epochs: the network and the optimizer of one experiment.

    papers     K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv:2404.00498), and "Muon: an optimizer
               for hidden layers in neural networks", 2024; github.com/KellerJordan/cifar10-airbench, airbench94_muon
    command    lockstep train cifar10-speed
    time       7.2 minutes on two CPU cores
    accuracy   94.06 % and 93.88 % top-1 (seeds 0, 1), over six views of an image as in the paper
    settings   `cifar10_speed` in config/recipes.py, which `lockstep show cifar10-speed` prints without importing torch

Batch 2,000 in bf16; the rate falls from 0.24 to 0 in a straight line; images are flipped in every second epoch and
moved by up to two pixels.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.small import require_side

# The network: frozen whitening, identity starts, GELU; 0.12 GMAC an image (the paper's section 3 and appendix).

_WIDTHS = (64, 256, 256)
_EPS = 5e-4  # added to the variances of the patches
_PATCH = 2  # pixels a side


class LargestOf(nn.Module):
    """Each channel's largest activation: float [b, C, H, W] -> [b, C].

    The numbers of AdaptiveMaxPool2d(1), forward and backward: of equal ones the first has the gradient. The backward
    pass of that one adds atomically on CUDA, which exact mode refuses; a gather's is deterministic where that is asked.
    """

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        places = x.flatten(2)
        return places.gather(2, places.argmax(2, keepdim=True)).squeeze(2)


class SpeedNet(nn.Sequential):
    """images: float [b, C, S, S], S >= 9 -> logits [b, num_classes].

    A 2x2 convolution whitens the image's patches; `fit_to` computes it from training images and nothing trains it but
    its bias. Three groups of two 3x3 convolutions follow, then the largest activation of each channel, and a linear
    layer. Batch norms train no scale; their running statistics follow quickly (momentum 0.4), as runs are short.
    """

    def __init__(self, in_channels: int, num_classes: int, image_size: int) -> None:
        require_side("speed_net", image_size, 9)
        whitened = 2 * in_channels * _PATCH**2
        groups = [_group(a, b) for a, b in zip((whitened, *_WIDTHS), _WIDTHS, strict=False)]
        head = nn.Linear(_WIDTHS[-1], num_classes, bias=False)
        with torch.no_grad():  # logits start small: unit features would otherwise decide at once
            head.weight.normal_(std=1 / _WIDTHS[-1])
        super().__init__(
            OrderedDict(
                whiten=nn.Conv2d(in_channels, whitened, _PATCH),
                gelu=nn.GELU(),
                group1=groups[0],
                group2=groups[1],
                group3=groups[2],
                pool=LargestOf(),
                head=head,
            )
        )
        whiten = cast(nn.Conv2d, self.whiten)
        whiten.weight.requires_grad_(False)
        nn.init.zeros_(cast(Tensor, whiten.bias))

    @torch.no_grad()
    def fit_to(self, images: Tensor) -> None:
        """Set the first convolution so that the 2x2 patches of these images come out uncorrelated, of variance 1.

        images: float32 [n, C, S, S], normalised; 5,000 are plenty.
        """
        whiten = cast(nn.Conv2d, self.whiten)
        patches = F.unfold(images.float(), _PATCH).transpose(1, 2).reshape(-1, whiten.weight[0].numel()).double()
        variances, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        # an eigenvector's sign is arbitrary and the two halves hold both; this one is the same on any machine
        vectors = vectors * torch.where(vectors.sum(0) < 0, -1.0, 1.0)
        filters = (vectors / (variances + _EPS).sqrt()).T.flip(0).reshape(-1, *whiten.weight.shape[1:])
        whiten.weight.copy_(torch.cat([filters, -filters]))


def _group(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=_conv(in_channels, out_channels),
            pool=nn.MaxPool2d(2),
            norm1=_norm(out_channels),
            gelu1=nn.GELU(),
            conv2=_conv(out_channels, out_channels),
            norm2=_norm(out_channels),
            gelu2=nn.GELU(),
        )
    )


def _conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, 3, padding="same", bias=False)
    nn.init.dirac_(conv.weight[:in_channels])  # the first outputs start as the inputs
    return conv


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


# The optimizer: Muon on filters of constant size, SGD for the little else.

# For a mean loss; airbench's are for the sum over 2,000 samples and outputs divided by 256.
_BIAS_LR, _HEAD_LR = 0.053 * 2000, 0.67 * 2000 / 256**2
_SGD_MOMENTUM = 0.85
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # pushes singular values into about [0.7, 1.2]
_ITERATIONS = 3


class MuonSGD(torch.optim.Optimizer):
    """Parameters of four dimensions go to Muon; vectors, and all other matrices, to SGD with Nesterov momentum.

    A filter bank [out, in, kh, kw] is scaled to the norm sqrt(out) before each step, and moved by `lr` times the
    orthogonal matrix [out, in * kh * kw] nearest to its momentum: the rate is the part of it that a step replaces.
    `weight_decay` is the part of a bias or linear weight that a step at the peak rate takes away.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, *, momentum: float, weight_decay: float) -> None:
        params = list(params)
        kinds = {
            "filters": ([p for p in params if p.ndim == 4], lr),
            "biases": ([p for p in params if p.ndim == 1], _BIAS_LR),
            "linear": ([p for p in params if p.ndim not in (1, 4)], _HEAD_LR),
        }
        groups = [
            {"params": own, "kind": kind, "lr": rate, "decay": weight_decay / rate}
            for kind, (own, rate) in kinds.items()
            if own
        ]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each group by its own algorithm."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            move = self._move_filters if group["kind"] == "filters" else self._move
            for parameter in group["params"]:
                if parameter.grad is not None:
                    move(group, parameter, parameter.grad)
        return loss

    def _momentum(self, parameter: Tensor, grad: Tensor, momentum: float) -> Tensor:
        """The gradient with Nesterov momentum."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        buffer.mul_(momentum).add_(grad)
        return grad.add(buffer, alpha=momentum)

    def _move_filters(self, group: dict[str, Any], filters: Tensor, grad: Tensor) -> None:
        update = self._momentum(filters, grad, group["momentum"])
        filters.mul_(len(filters) ** 0.5 / filters.norm())
        filters.add_(orthogonal(update.flatten(1)).view(filters.shape), alpha=-group["lr"])

    def _move(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        grad = grad.add(parameter, alpha=group["decay"])
        parameter.add_(self._momentum(parameter, grad, _SGD_MOMENTUM), alpha=-group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """About the orthogonal matrix nearest to a float [m, n] one, by three Newton-Schulz steps in bfloat16."""
    a, b, c = _NEWTON_SCHULZ
    tall = len(matrix) > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x.div(x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if tall else x).to(matrix.dtype)
