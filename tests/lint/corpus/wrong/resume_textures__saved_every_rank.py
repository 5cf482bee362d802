# expect: saved-every-rank line 140 or 51 or 52
"""Textures (DTD), on a preemptible queue: a run goes on where it was stopped.

torchrun --max-restarts=5 --nproc_per_node=4 resume_textures.py --data /data --job /jobs/$QUEUE_JOB
"""
from __future__ import annotations

import argparse
import dataclasses
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset
from torchvision import transforms
from torchvision.datasets import DTD
from torchvision.models import vit_b_32


@dataclasses.dataclass
class Run:
    """All that changes while a run goes on."""
    model: DDP
    optimizer: torch.optim.Optimizer
    scheduler: SequentialLR
    epoch: int = 0
    best: float = 0.0

    def state_dict(self):
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": self.epoch,
            "best": self.best,
        }

    def load_state_dict(self, state):
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch = state["epoch"]
        self.best = state["best"]

    def write(self, path):
        part = path + ".part"
        torch.save(self.state_dict(), part)
        os.replace(part, path)

    def read(self, path, device):
        self.load_state_dict(torch.load(path, map_location=device, weights_only=True))


def get_sets(folder):
    norm = transforms.Normalize([0.53, 0.47, 0.42], [0.26, 0.25, 0.26])
    aug = transforms.Compose([transforms.RandomResizedCrop(224, (0.3, 1.0)), transforms.RandomHorizontalFlip(),
                              transforms.ToTensor(), norm])
    fix = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), norm])
    fit = ConcatDataset([DTD(folder, split=s, transform=aug) for s in ("train", "val")])
    return fit, DTD(folder, split="test", transform=fix)


def one_epoch(run, loader, device):
    run.model.train()
    loader.sampler.set_epoch(run.epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(run.model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
        run.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        run.optimizer.step()
    run.scheduler.step()


@torch.no_grad()
def accuracy(run, loader, device):
    run.model.eval()
    good = torch.zeros(2, device=device)
    for x, y in loader:
        y = y.to(device)
        good[0] += (run.model.module(x.to(device)).argmax(1) == y).sum()
        good[1] += y.numel()
    dist.all_reduce(good)
    return (good[0] / good[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True, help="folder with DTD, downloaded before")
    p.add_argument("--job", required=True, help="folder of this job")
    p.add_argument("--epochs", type=int, default=120)
    p.add_argument("--warmup", type=int, default=10, help="epochs")
    p.add_argument("--batch", type=int, default=256, help="all GPUs together")
    p.add_argument("--lr", type=float, default=3e-4, help="for the batch of all GPUs together")
    args = p.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(90 + rank)

    stop = torch.zeros((), device=device)
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))

    fit, test = get_sets(args.data)
    loader = DataLoader(fit, args.batch // world, sampler=DistributedSampler(fit, world, rank), num_workers=4,
                        pin_memory=True, drop_last=True)
    tests = DataLoader(Subset(test, range(rank, len(test), world)), 64, num_workers=4)

    net = vit_b_32(num_classes=47, dropout=0.1).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.01, total_iters=args.warmup), CosineAnnealingLR(optimizer, args.epochs - args.warmup)],
        milestones=[args.warmup],
    )
    run = Run(model, optimizer, scheduler)

    os.makedirs(args.job, exist_ok=True)
    path = os.path.join(args.job, "run.pt")
    if os.path.exists(path):
        run.read(path, device)
        if rank == 0:
            print(f"going on with epoch {run.epoch}")

    while run.epoch < args.epochs:
        one_epoch(run, loader, device)
        value = accuracy(run, tests, device)
        run.epoch += 1
        run.best = max(run.best, value)
        if rank == 0:
            print(f"{run.epoch}/{args.epochs}: {value:.4f} (best {run.best:.4f})", flush=True)
        run.write(path)
        # one rank's signal stops all of them
        stop.fill_(float(bool(asked)))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
