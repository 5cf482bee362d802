"""Step 14: the same with Lockstep.

    python 14-the-same.py --nproc 4
    python 14-the-same.py --nproc 4 --wrong     the habit of step 3: a batch size for each process

It also runs under torchrun, srun and mpirun, on several machines.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import lockstep as ls


def main(world: ls.World, wrong: bool) -> None:
    batch = 64 * world.size if wrong else 64  # of all processes together
    train, test = ls.loaders("digits", world, batch_size=batch)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)]
    model = ls.parallelize(nn.Sequential(nn.Flatten(), *layers).to(world.device), world, batch_norm="global")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = ls.TrainStep(model, F.cross_entropy, optimizer)
    for number, epoch in enumerate(train.epochs(3), start=1):
        steps = sum(1 for batch in epoch if step(batch) is not None)
        metrics = ls.evaluate(model, test, world)
        world.print(f"epoch {number}: {steps} steps, test loss {metrics.loss:.3f}, accuracy {metrics.top1:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--nproc", type=int, default=1)
    args = parser.parse_args()
    ls.launch(main, args.wrong, nproc=args.nproc)
