# expect: none
"""Homework 5, question 2: data-parallel training on the CPUs of the lab machines.

    torchrun --nnodes=4 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=lab01:$PORT gloo_digits.py
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, random_split
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import USPS


class MLP(nn.Module):
    def __init__(self, hidden=256, p=0.25):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(256, hidden), nn.ReLU(), nn.Dropout(p),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(p),
            nn.Linear(hidden, 10),
        )

    def forward(self, x):
        return self.layers(x)


def load_usps(folder):
    # each machine has a disk of its own: its first process fetches, the others wait
    if int(os.environ["LOCAL_RANK"]) == 0:
        USPS(folder, train=True, download=True)
    dist.barrier()
    return USPS(folder, train=True, transform=transforms.ToTensor())


def split(full, seed):
    n_dev = len(full) // 10
    return random_split(full, [len(full) - n_dev, n_dev], generator=torch.Generator().manual_seed(seed))


def train(model, loader, criterion, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def evaluate(model, loader):
    """(loss, accuracy) over the dev set, of all processes together."""
    net = model.module
    net.eval()
    stats = torch.zeros(3)
    with torch.no_grad():
        for x, y in loader:
            out = net(x)
            stats[0] += nn.functional.cross_entropy(out, y, reduction="sum")
            stats[1] += (out.argmax(dim=1) == y).float().sum()
            stats[2] += len(y)
    dist.all_reduce(stats, op=dist.ReduceOp.SUM)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="./usps", help="on the local disk")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=256, help="total batch, shared out over the processes")
    parser.add_argument("--lr", type=float, default=0.1, help="for the total batch")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + 100 * rank)

    full = load_usps(args.folder)
    train_part, dev_part = split(full, args.seed)
    sampler = DistributedSampler(train_part, num_replicas=world, rank=rank, shuffle=True)
    train_iter = DataLoader(train_part, batch_size=args.batch // world, sampler=sampler, drop_last=True)
    dev_iter = DataLoader(Subset(dev_part, range(rank, len(dev_part), world)), batch_size=512)

    model = DDP(MLP())
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    t0 = time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(model, train_iter, criterion, optimizer)
        scheduler.step()
        dev_loss, dev_acc = evaluate(model, dev_iter)
        if rank == 0:
            print(f"Epoch {epoch + 1}/{args.epochs} | dev loss {dev_loss:.4f} | dev acc {dev_acc:.4f}")
    if rank == 0:
        print(f"Total time: {time.time() - t0:.1f} s on {world} processes")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
