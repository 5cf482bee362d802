"""A few labelled pictures and many without a label: FixMatch (arXiv:2001.07685) on digits.

python examples/own_loops/semi_supervised.py
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls

UNKNOWN = 10  # the label of a picture without one, a class more than there are


class Views(nn.Module):
    """In training the logits of each picture as it is, and of a much changed view of it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        logits = self.net(images)
        return (logits, self.net(images + 0.5 * torch.randn_like(images))) if self.training else logits


def fixmatch(views: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Each sample's loss [b]: its label where it has one, else what the network is sure of in the plain view."""
    plain, changed = views
    confidence, guess = plain.detach().softmax(1).max(1)
    known = labels != UNKNOWN
    supervised = F.cross_entropy(plain, torch.where(known, labels, 0), reduction="none")
    consistent = F.cross_entropy(changed, guess, reduction="none") * (confidence > 0.9)
    return torch.where(known, supervised, consistent)


def main(world: ls.World) -> list[float]:
    whole, val = ls.loaders("digits", world, batch_size=128)
    images, labels = whole.images.read(np.arange(len(whole.images)), None)  # uint8 [n, 1, 8, 8], int64 [n]
    labels[100:] = UNKNOWN
    train, _ = ls.loaders(((images, labels), (images[:100], labels[:100])), world, batch_size=128)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = ls.parallelize(Views(net).to(world.device), world)
    step = ls.TrainStep(model, fixmatch, torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses = []
    for epoch in train.epochs(4):
        for batch in epoch:
            step(batch)
        metrics = ls.evaluate(model, val, world)
        world.print(metrics)
        losses.append(metrics.loss)
    return losses


if __name__ == "__main__":
    ls.launch(main)
