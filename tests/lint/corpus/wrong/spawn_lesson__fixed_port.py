# expect: fixed-port line 22
"""Lesson: one process per GPU with torch.multiprocessing.spawn."""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torchvision.transforms as transforms
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import KMNIST

ROOT = "kmnist_data"
SEED = 6


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "12355"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


class KuzushijiNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
        )
        self.fc = nn.Linear(2 * width * 49, 10)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


def train(model, loader, optimizer, loss_fn, rank):
    model.train()
    for x, y in loader:
        x, y = x.to(rank, non_blocking=True), y.to(rank, non_blocking=True)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()


def test(model, loader, rank):
    model.eval()
    correct = torch.zeros(1, device=rank)
    total = torch.zeros(1, device=rank)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(rank), y.to(rank)
            correct += (model(x).argmax(1) == y).sum()
            total += y.size(0)
    dist.all_reduce(correct)
    dist.all_reduce(total)
    return (correct / total).item()


def main_worker(rank, world_size, epochs, total_batch):
    setup(rank, world_size)
    torch.manual_seed(SEED + rank)

    plain = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.19,), (0.35,))])
    augmented = transforms.Compose([transforms.RandomAffine(10, translate=(0.1, 0.1)), plain])
    train_data = KMNIST(ROOT, train=True, transform=augmented)
    test_data = KMNIST(ROOT, train=False, transform=plain)

    sampler = DistributedSampler(train_data, num_replicas=world_size, rank=rank, shuffle=True)
    # total_batch images per step altogether, so the rate below holds for any number of GPUs
    train_dl = DataLoader(train_data, batch_size=total_batch // world_size, sampler=sampler, num_workers=2)
    test_dl = DataLoader(Subset(test_data, range(rank, len(test_data), world_size)), batch_size=500)

    model = DDP(KuzushijiNet().to(rank), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()

    best = 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        train(model, train_dl, optimizer, loss_fn, rank)
        accuracy = test(model.module, test_dl, rank)
        if rank == 0:
            print(f"epoch {epoch}: {accuracy:.4f}")
            if accuracy > best:
                best = accuracy
                torch.save(model.module.state_dict(), "kmnist_best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    if n < 1:
        sys.exit("needs a GPU")
    KMNIST(ROOT, download=True)
    mp.spawn(main_worker, args=(n, 8, 240), nprocs=n, join=True)
