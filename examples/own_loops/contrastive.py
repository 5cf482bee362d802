"""Losses that compare the samples of a batch with each other: supervised contrastive, and pairs of views.

python examples/own_loops/contrastive.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls


class Encoder(nn.Module):
    """Two views of each picture, by noise, as vectors of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (self.net(images + 0.1 * torch.randn_like(images)) for _ in range(2))
        return F.normalize(first), F.normalize(second)


def supervised_contrastive(views: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Khosla et al., arXiv:2004.11362: pictures of a class are drawn together, in both views [b, d]."""
    vectors, classes = torch.cat(views), labels.repeat(2)
    itself = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    logits = (vectors @ vectors.T / 0.1).masked_fill(itself, -1e9)
    alike = (classes[:, None] == classes) & ~itself
    return -(logits.log_softmax(1) * alike).sum(1).div(alike.sum(1)).mean()


def in_batch_negatives(views: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    """A picture's second view among those of all others, as in SimCLR and CLIP."""
    first, second = views
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first), device=first.device))


def main(world: ls.World) -> list[float]:
    losses = []
    for loss in (supervised_contrastive, in_batch_negatives):
        torch.manual_seed(0)
        train, _ = ls.loaders("digits", world, batch_size=128, fraction=0.5)
        model = ls.parallelize(Encoder().to(world.device), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = ls.TrainStep(model, loss, optimizer, whole_batch=True)
        for epoch in train.epochs(2):
            losses.append(float(torch.stack([step(batch) for batch in epoch]).mean()))
            world.print(f"{loss.__name__}: {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    ls.launch(main)
