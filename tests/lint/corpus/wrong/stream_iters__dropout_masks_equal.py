# expect: dropout-masks-equal line 80 or 82 or 81 or 23
"""Iteration-based training: an endless stream of batches, evaluation every so many steps."""
import argparse
import itertools
import os

import torch
import torch.distributed
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2 as T


def conv_block(cin, cout, stride):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.GroupNorm(16, cout), nn.SiLU())


def build_net(classes):
    return nn.Sequential(
        conv_block(3, 64, 2), conv_block(64, 128, 2), conv_block(128, 256, 2), conv_block(256, 512, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, classes))


def endless(loader, sampler):
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def on_device(stream, device):
    for x, y in stream:
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


class Window:
    """Mean of a loss over the steps since it was last read, over all processes."""

    def __init__(self, device):
        self.sum = torch.zeros((), device=device)
        self.steps = 0

    def add(self, loss):
        self.sum += loss.detach()
        self.steps += 1

    def read(self):
        torch.distributed.all_reduce(self.sum, op=torch.distributed.ReduceOp.AVG)
        value = self.sum.item() / self.steps
        self.sum.zero_()
        self.steps = 0
        return value


def evaluate(net, loader, device):
    net.eval()
    n = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in on_device(loader, device):
            n[0] += (net(x).argmax(1) == y).sum()
            n[1] += y.numel()
    net.train()
    torch.distributed.all_reduce(n)
    return (n[0] / n[1]).item()


def train(args, rank, world, local_rank):
    device = torch.device("cuda", local_rank)
    norm = [T.ToImage(), T.ToDtype(torch.float32, scale=True), T.Normalize([0.5] * 3, [0.5] * 3)]
    train_set = ImageFolder(f"{args.data}/train", T.Compose([T.RandomResizedCrop(128), *norm]))
    held_out = ImageFolder(f"{args.data}/val", T.Compose([T.Resize(144), T.CenterCrop(128), *norm]))
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch // world, sampler=sampler, num_workers=args.workers,
                              pin_memory=True, drop_last=True, persistent_workers=True,
                              generator=torch.Generator().manual_seed(args.seed + 1 + rank))
    val_loader = DataLoader(Subset(held_out, range(rank, len(held_out), world)), 256,
                            num_workers=args.workers, pin_memory=True)

    torch.manual_seed(args.seed)
    net = build_net(len(train_set.classes)).to(device)
    model = DistributedDataParallel(net, device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.steps, power=0.9)

    model.train()
    window = Window(device)
    batches = on_device(endless(train_loader, sampler), device)
    for step, (x, y) in enumerate(itertools.islice(batches, args.steps), start=1):
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        window.add(loss)
        if step % args.eval_every and step != args.steps:
            continue
        train_loss = window.read()
        accuracy = evaluate(net, val_loader, device)
        if rank == 0:
            print(f"step {step}: loss {train_loss:.4f} accuracy {accuracy:.4f}", flush=True)
            torch.save(net.state_dict(), os.path.join(args.out, f"net_{step:07d}.pt"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=512, help="images per step, all GPUs together")
    parser.add_argument("--lr", type=float, default=0.2, help="for --batch images")
    parser.add_argument("--workers", type=int, default=4, help="per GPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} does not divide by {world} processes")
    os.makedirs(args.out, exist_ok=True)
    try:
        train(args, rank, world, local_rank)
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
