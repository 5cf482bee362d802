"""Two networks with an optimizer each: a GAN of digits.

python examples/own_loops/two_optimizers.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls


class Judge(nn.Module):
    """What the discriminator says of real pictures and of drawn ones."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        drawn = self.generator(torch.randn(len(images), 16, device=images.device)).detach()
        return self.discriminator(images), self.discriminator(drawn)


class Forger(nn.Module):
    """What the discriminator says of drawn pictures, as the generator learns by it."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, images: Tensor) -> Tensor:
        return self.discriminator(self.generator(torch.randn(len(images), 16, device=images.device)))


def judged(outputs: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    real, drawn = outputs
    return F.softplus(-real).mean() + F.softplus(drawn).mean()


def forged(drawn: Tensor, _: Tensor) -> Tensor:
    return F.softplus(-drawn).mean()


def turn(learns: nn.Module, waits: nn.Module) -> None:
    """Before each step, and before `parallelize`: gradients for the one network alone."""
    learns.requires_grad_(True)
    waits.requires_grad_(False)


def main(world: ls.World) -> list[float]:
    train, _ = ls.loaders("digits", world, batch_size=128, fraction=0.5)
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Unflatten(1, (1, 8, 8)))
    discriminator = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    turn(discriminator, generator)
    judge = ls.parallelize(Judge(generator, discriminator).to(world.device), world)
    step_d = ls.TrainStep(judge, judged, torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)))
    turn(generator, discriminator)
    forger = ls.parallelize(Forger(generator, discriminator).to(world.device), world)
    optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    step_g = ls.TrainStep(forger, forged, optimizer, seed=1)  # another seed than step_d's: other noise
    losses = []
    for epoch in train.epochs(2):
        for batch in epoch:
            turn(discriminator, generator)
            losses.append(float(step_d(batch)))
            turn(generator, discriminator)
            losses.append(float(step_g(batch)))
        world.print(f"discriminator {losses[-2]:.4f}, generator {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    ls.launch(main)
