"""A small convolutional network that learns CIFAR-10 in a few epochs: frozen whitening, identity starts, GELU.

After the network of K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv:2404.00498), section 3 and
appendix: 0.12 GMAC an image.
"""

from collections import OrderedDict
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UserError

_WIDTHS = (64, 256, 256)
_EPS = 5e-4  # added to the variances of the patches
_PATCH = 2  # pixels a side


class SpeedNet(nn.Sequential):
    """images: float [b, C, S, S], S >= 25 -> logits [b, num_classes].

    A 2x2 convolution whitens the image's patches; `fit_to` computes it from training images and nothing trains it but
    its bias. Three groups of two 3x3 convolutions follow, then the largest activation of each channel, and a linear
    layer. Batch norms train no scale; their running statistics follow quickly (momentum 0.4), as runs are short.
    """

    def __init__(self, in_channels: int, num_classes: int, image_size: int) -> None:
        whitened = 2 * in_channels * _PATCH**2
        side = image_size - _PATCH + 1
        for _ in _WIDTHS:
            side //= 2
        if side < 1:
            raise UserError(
                f"model speed_net needs images of at least 9x9, and these are {image_size}x{image_size}",
                "Give --image-size 32, or another --model.",
            )
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
                pool=nn.AdaptiveMaxPool2d(1),
                flatten=nn.Flatten(),
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
