"""Networks that draw in their forward passes, small enough for a test."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import SwinTransformer, VisionTransformer
from torchvision.ops import StochasticDepth

from lockstep.models.small import mnist_net

CLASSES = 6


class Everything(nn.Module):
    """Each way to draw, once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.channels, self.depth, self.row = (
            nn.Dropout2d(0.3),
            StochasticDepth(0.4, "batch"),
            StochasticDepth(0.4, "row"),
        )
        self.alpha, self.feature_alpha, self.rrelu = nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.RReLU()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)  # sequence first: the batch is dimension 1
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rrelu(self.channels(self.conv(x)))
        x = self.row(x) + self.depth(x)
        x = self.feature_alpha(self.alpha(F.max_pool2d(x, 2)))
        x = x + torch.rand_like(x) + torch.randn(x.shape).to(x) + torch.rand(1).to(x)  # the last is one for all
        x = x * torch.bernoulli(torch.full_like(x, 0.9)) + torch.empty_like(x).exponential_(3.0)
        x = x + x.new_empty(len(x), 1, 1, 1).normal_(0.0, 0.1) + x.new_empty(len(x), 1, 1, 1).uniform_(-1, 1)
        x = x[:, torch.randperm(8)]
        x = self.encoder(x.flatten(2).permute(2, 0, 1))
        x = F.dropout(x.permute(1, 2, 0).reshape(-1, x.shape[0]), 0.2, inplace=True).view(x.shape[1], 8, -1)  # folded
        logits: Tensor = self.head(x.mean(2))
        return logits + F.gumbel_softmax(logits)


class Checkpointed(nn.Module):
    """Dropout in parts that are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.reentrant = nn.Conv2d(3, 8, 3), reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(0.4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(F.dropout(x.mean((2, 3)), 0.3))
        return logits


class Plain(Checkpointed):
    """The same without checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.stem, *self.blocks):
            x = block(x)
        logits: Tensor = self.head(F.dropout(x.mean((2, 3)), 0.3))
        return logits


def swin() -> nn.Module:
    options: dict[str, Any] = {"dropout": 0.3, "attention_dropout": 0.3, "stochastic_depth_prob": 0.5}
    return SwinTransformer([2, 2], 12, [2, 2], [3, 6], [4, 4], num_classes=CLASSES, **options)


def vit() -> nn.Module:
    model = VisionTransformer(16, 4, 2, 5, 20, 40, dropout=0.2, attention_dropout=0.2, num_classes=CLASSES)
    nn.init.normal_(model.get_parameter("heads.head.weight"))  # zeros by default, which would hide everything
    return model


def timm_vit() -> nn.Module:
    from timm.models import VisionTransformer as Timm

    rates: dict[str, Any] = {
        "drop_path_rate": 0.3,
        "proj_drop_rate": 0.2,
        "attn_drop_rate": 0.3,
        "patch_drop_rate": 0.4,
    }
    return Timm(16, 4, embed_dim=24, depth=2, num_heads=3, num_classes=CLASSES, **rates)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {  # what makes it, channels and side
    "mnist_net": (lambda: mnist_net(1, CLASSES, 12), (1, 12)),
    "everything": (Everything, (3, 8)),
    "swin": (swin, (3, 32)),
    "vit": (vit, (3, 16)),
    "timm's vit": (timm_vit, (3, 16)),
    "checkpoints": (lambda: Checkpointed(False), (3, 6)),
    "reentrant checkpoints": (lambda: Checkpointed(True), (3, 6)),
}
