# expect: dropout-masks-equal line 80 or 81
"""CIFAR-100 with a small vision transformer.

    torchrun --nproc-per-node=8 vit_warmup.py --data /datasets/cifar --out runs/vit
"""
import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms as T


class TinyViT(nn.Module):
    def __init__(self, classes, dim=256, depth=8, heads=4, patch=4, drop=0.1):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, (32 // patch) ** 2 + 1, dim) * 0.02)
        self.drop = nn.Dropout(drop)
        block = nn.TransformerEncoderLayer(dim, heads, 4 * dim, drop, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = self.blocks(self.drop(x + self.pos))
        return self.head(self.norm(x[:, 0]))


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, required=True, help="folder with the unpacked archive")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--warmup-epochs", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=128, help="per GPU")
    p.add_argument("--base-lr", type=float, default=5e-4, help="for 512 images a step; scaled to the real number")
    p.add_argument("--workers", type=int, default=4, help="per process")
    p.add_argument("--seed", type=int, default=7)
    return p.parse_args()


def warmup_cosine(warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    return factor


@torch.no_grad()
def accuracy(net, loader, device):
    net.eval()
    tally = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        tally[0] += (net(images).argmax(1) == labels).sum()
        tally[1] += len(labels)
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()


def main():
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    net = DDP(TinyViT(100).to(device), device_ids=[local_rank])
    worker_seeds = torch.Generator().manual_seed(args.seed + 1 + rank)

    norm = T.Normalize((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
    augment = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.RandAugment(), T.ToTensor(), norm])
    train_set = datasets.CIFAR100(args.data, train=True, transform=augment)
    test_set = datasets.CIFAR100(args.data, train=False, transform=T.Compose([T.ToTensor(), norm]))
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_batches = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=args.workers,
                               pin_memory=True, drop_last=True, generator=worker_seeds)
    mine = Subset(test_set, range(rank, len(test_set), world))
    test_batches = DataLoader(mine, 2 * args.batch_size, num_workers=args.workers, pin_memory=True)

    lr = args.base_lr * args.batch_size * world / 512
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.05)
    steps = len(train_batches)
    lr_schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, warmup_cosine(args.warmup_epochs * steps, args.epochs * steps))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        seen = torch.zeros(2, dtype=torch.float64, device=device)
        for images, labels in train_batches:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(net(images), labels, label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            lr_schedule.step()
            seen[0] += loss.detach() * len(labels)
            seen[1] += len(labels)
        dist.all_reduce(seen)
        top1 = accuracy(net.module, test_batches, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {(seen[0] / seen[1]).item():.4f}, test accuracy {top1:.2%}")

    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        torch.save(net.module.state_dict(), args.out / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
