"""The CIFAR-10 script by Lockstep: `python cifar10_after.py 2`, or `torchrun --nproc-per-node 2 cifar10_after.py`."""

import sys

import torch
import torch.nn.functional as F
from torchvision import datasets, models, transforms

import lockstep as ls


def main(world, data="data", fraction=0.25, batch_norm="auto"):
    torch.manual_seed(0)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])
    with world.first_on_host():  # one process downloads, the others find it done
        sets = [datasets.CIFAR10(data, train=part, download=True, transform=transform) for part in (True, False)]
    train, val = ls.loaders(sets, world, batch_size=32, fraction=fraction)
    model = ls.parallelize(models.resnet18(num_classes=10).to(world.device), world, batch_norm=batch_norm)
    step = ls.TrainStep(model, F.cross_entropy, torch.optim.Adam(model.parameters(), lr=1e-3))
    for number, epoch in enumerate(train.epochs(2), start=1):
        loss = sum(step(batch) * batch.count for batch in epoch) / train.order.samples_per_epoch
        world.print(f"epoch {number}: loss {loss:.6f} accuracy {ls.evaluate(model, val, world).top1:.4f}")


if __name__ == "__main__":
    ls.launch(main, nproc=int(sys.argv[1]) if len(sys.argv) > 1 else "auto")
