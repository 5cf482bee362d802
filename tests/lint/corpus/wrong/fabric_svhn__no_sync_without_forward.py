# expect: no-sync-without-forward line 102 or 101 or 103
"""Course project: house numbers with Lightning Fabric.

fabric run --accelerator=cuda --devices=2 fabric_svhn.py   (or plainly with python)
"""
import time
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import SVHN

hp = SimpleNamespace(
    data="./svhn",
    epochs=25,
    batch_per_gpu=128,
    lr_per_gpu=0.03,
    momentum=0.9,
    accumulate=2,
    seed=4321,
    devices=2,
)


def block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False),
        nn.GroupNorm(8, cout),
        nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False),
        nn.GroupNorm(8, cout),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
    )


class DigitNet(nn.Sequential):
    def __init__(self):
        super().__init__(block(3, 64), block(64, 128), block(128, 256), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 10))


def datasets(fabric):
    to_tensor = transforms.Compose([transforms.ToTensor(),
                                    transforms.Normalize((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))])
    jitter = transforms.Compose([transforms.RandomCrop(32, padding=3), to_tensor])
    with fabric.rank_zero_first(local=True):
        train = SVHN(hp.data, split="train", transform=jitter, download=fabric.local_rank == 0)
        test = SVHN(hp.data, split="test", transform=to_tensor, download=fabric.local_rank == 0)
    return train, test


def test_accuracy(fabric, model, loader):
    model.eval()
    correct = torch.zeros((), device=fabric.device)
    total = torch.zeros((), device=fabric.device)
    with torch.no_grad():
        for image, label in loader:
            correct += (model(image).argmax(1) == label).sum()
            total += label.numel()
    correct = fabric.all_reduce(correct, reduce_op="sum")
    total = fabric.all_reduce(total, reduce_op="sum")
    model.train()
    return (correct / total).item()


def main():
    fabric = Fabric(accelerator="cuda", devices=hp.devices, strategy=DDPStrategy(broadcast_buffers=False),
                    precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(hp.seed + fabric.global_rank)

    train, test = datasets(fabric)
    sampler = DistributedSampler(train, fabric.world_size, fabric.global_rank, shuffle=True, seed=hp.seed)
    train_batches = DataLoader(train, batch_size=hp.batch_per_gpu, sampler=sampler, num_workers=2, drop_last=True)
    own = range(fabric.global_rank, len(test), fabric.world_size)
    test_batches = DataLoader(Subset(test, own), batch_size=500)
    train_batches, test_batches = fabric.setup_dataloaders(train_batches, test_batches, use_distributed_sampler=False)

    model = DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=hp.lr_per_gpu * fabric.world_size, momentum=hp.momentum)
    model, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=hp.epochs)

    usable = len(train_batches) - len(train_batches) % hp.accumulate
    model.train()
    for epoch in range(hp.epochs):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        for i, (image, label) in enumerate(train_batches):
            left = len(train_batches) - usable
            window = hp.accumulate if i < usable else left
            last = (i + 1) % hp.accumulate == 0 or i + 1 == len(train_batches)
            loss = F.cross_entropy(model(image), label) / window
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(loss)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        accuracy = test_accuracy(fabric, model, test_batches)
        fabric.print(f"{epoch:2d}  {accuracy:.4f}  {time.perf_counter() - started:.1f} s")

    fabric.save("svhn_final.ckpt", {"model": model})


if __name__ == "__main__":
    main()
