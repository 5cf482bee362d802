"""The loop of accelerate_before.py by Lockstep: `python accelerate_after.py 2`."""

import sys

import torch
import torch.nn.functional as F

import lockstep as ls
from net import digits_net


def main(world):
    torch.manual_seed(0)
    train, _ = ls.loaders("digits", world, batch_size=64, drop_last=True)
    model = ls.parallelize(digits_net().to(world.device), world)
    step = ls.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, epoch in enumerate(train.epochs(3), start=1):
        loss = sum(step(batch) * batch.count for batch in epoch) / train.order.samples_per_epoch
        world.print(f"epoch {number}: loss {loss:.6f}")


if __name__ == "__main__":
    ls.launch(main, nproc=int(sys.argv[1]) if len(sys.argv) > 1 else "auto")
