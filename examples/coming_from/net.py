"""The networks and data that the scripts before and after share."""

from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def mnist_net(dropout: float = 0.25) -> nn.Module:
    """As the MNIST scripts have it. Masks are drawn in other ways before and after: to compare, 0."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(2 * dropout), nn.Linear(128, 10),
    )  # fmt: skip


def digits_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits() -> TensorDataset:
    """Images float [1437, 1, 8, 8] and labels, the training set that comes with Lockstep."""
    data = bytearray((files("lockstep.data") / "digits" / "train.bin").read_bytes())
    records = torch.frombuffer(data, dtype=torch.uint8).view(-1, 65)
    images: Tensor = (records[:, 1:].view(-1, 1, 8, 8).float() / 255 - 0.3058) / 0.3761
    return TensorDataset(images, records[:, 0].long())
