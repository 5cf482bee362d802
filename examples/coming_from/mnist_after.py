"""The MNIST script by Lockstep: `python mnist_after.py 2`, or `torchrun --nproc-per-node 2 mnist_after.py`."""

import sys

import torch
import torch.nn.functional as F

import lockstep as ls
from net import mnist_net


def main(world, data="data", fraction=1.0, dropout=0.25):
    torch.manual_seed(1)
    train, val = ls.loaders("mnist", world, batch_size=64, seed=1, data_dir=data, fraction=fraction)
    model = ls.parallelize(mnist_net(dropout).to(world.device), world)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    size = train.order.samples_per_epoch
    step = ls.TrainStep(model, F.cross_entropy, optimizer, schedule=lambda samples: 0.7 ** (samples // size))
    for number, epoch in enumerate(train.epochs(2), start=1):
        loss = sum(step(batch) * batch.count for batch in epoch) / size
        world.print(f"epoch {number}: loss {loss:.6f} accuracy {ls.evaluate(model, val, world).top1:.4f}")


if __name__ == "__main__":
    ls.launch(main, nproc=int(sys.argv[1]) if len(sys.argv) > 1 else "auto")
