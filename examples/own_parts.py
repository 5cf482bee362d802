"""Your own data set, network and recipe with the command `lockstep train`, each named as module:function.

    cd examples
    lockstep train own_parts:recipe                          all three
    lockstep train --dataset own_parts:shapes --epochs 3     one of them in a recipe of ours
    lockstep train mnist --model own_parts:net

Modules are looked for in the current folder first, then among the installed packages.
"""

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config import Config, DataConfig, ModelConfig, OptimConfig

SIDE = 16


def shapes() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(train, val), each images uint8 [n, C, H, W] and labels int64 [n]. A parameter `data_dir` would get --data-dir.

    Datasets in the style of torchvision, with (image, label) items, will do as well.
    """
    return _draw(2000, seed=1), _draw(500, seed=2)


def _draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy outlines: 0 a square, 1 a disc's rim, 2 a cross."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    cy, cx = rng.integers(5, SIDE - 5, (2, count, 1, 1))
    radius = rng.integers(3, 6, (count, 1, 1))
    y, x = np.abs(np.arange(SIDE)[:, None] - cy), np.abs(np.arange(SIDE)[None, :] - cx)
    square = np.maximum(y, x) == radius
    rim = np.abs(np.hypot(y, x) - radius) < 0.6
    cross = (np.minimum(y, x) == 0) & (np.maximum(y, x) <= radius)
    ink = np.choose(labels[:, None, None], [square, rim, cross])
    pixels = np.where(ink, 200, 30) + rng.integers(-30, 31, ink.shape)
    return torch.from_numpy(pixels.astype(np.uint8)[:, None]), torch.from_numpy(labels)


def net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Take those of these three names that you need, or none."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (image_size // 2) ** 2, num_classes),
    )


def recipe() -> Config:
    """A recipe returns a Config. Each field stays a flag, as in `lockstep train own_parts:recipe --lr 0.01`."""
    return Config(
        epochs=5,
        batch_size=100,
        data=DataConfig(dataset="own_parts:shapes", flip=True),
        model=ModelConfig(model="own_parts:net"),
        optim=OptimConfig(optimizer="adamw", lr=3e-3, schedule="cosine", base_batch_size=100),
    )
