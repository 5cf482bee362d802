"""Train a model of your own with a plain `for`, on any number of processes.

    python examples/own_loop.py                            all cores, or all GPUs
    torchrun --nproc-per-node 2 examples/own_loop.py       the same file, started by another launcher

It is one and the same training on any number of processes: batch_size is what all of them share.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls


class MyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 3, padding=1)
        self.out = nn.Linear(32 * 8 * 8, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.conv(images).relu().flatten(1))


def main(world: ls.World) -> float:
    torch.manual_seed(0)  # the same first weights in every run; between ranks DDP copies them anyway
    train, val = ls.loaders("digits", world, batch_size=64, seed=0)  # batch_size is global
    model = ls.parallelize(MyNet().to(world.device), world)  # a real nn.Module
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # a real optimizer
    step = ls.TrainStep(model, F.cross_entropy, optimizer)
    for number, epoch in enumerate(train.epochs(10), start=1):
        for batch in epoch:
            step(batch)
        metrics = ls.evaluate(model, val, world)  # every sample once, the same on all ranks
        world.print(f"epoch {number}: {metrics}")
    return metrics.top1


if __name__ == "__main__":
    ls.launch(main)
