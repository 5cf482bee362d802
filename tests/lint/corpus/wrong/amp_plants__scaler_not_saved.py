# expect: scaler-not-saved line 125 or 108 or 112 or 131
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as tv
from torchvision.datasets import ImageFolder
from torchvision.models import convnext_small


def env():
    return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])


class Meter:
    """Sum and count kept on the device; read once per epoch."""

    def __init__(self, device):
        self.data = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, value, n):
        self.data[0] += value.detach() * n
        self.data[1] += n

    def mean(self):
        data = self.data.clone()
        dist.all_reduce(data)
        return (data[0] / data[1]).item()


def get_loaders(args, rank, world):
    norm = tv.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    a = tv.Compose([tv.RandomResizedCrop(args.size), tv.RandAugment(), tv.ToTensor(), norm])
    b = tv.Compose([tv.Resize(args.size + 32), tv.CenterCrop(args.size), tv.ToTensor(), norm])
    tr, va = ImageFolder(os.path.join(args.root, "train"), a), ImageFolder(os.path.join(args.root, "val"), b)
    sm = DistributedSampler(tr, shuffle=True, seed=args.seed)
    kw = dict(batch_size=args.batch_per_gpu, num_workers=args.workers_per_gpu, pin_memory=True)
    return (DataLoader(tr, sampler=sm, drop_last=True, **kw),
            DataLoader(Subset(va, range(rank, len(va), world)), **kw), len(tr.classes))


def train_epoch(model, loader, criterion, optimizer, scaler, scheduler, device, clip):
    model.train()
    avg = Meter(device)
    for img, cls in loader:
        img, cls = img.to(device, non_blocking=True), cls.to(device, non_blocking=True)
        with autocast("cuda", dtype=torch.float16):
            loss = criterion(model(img), cls)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        avg.add(loss, img.size(0))
    return avg.mean()


@torch.no_grad()
def val_epoch(net, loader, device):
    net.eval()
    avg = Meter(device)
    for img, cls in loader:
        img, cls = img.to(device, non_blocking=True), cls.to(device, non_blocking=True)
        with autocast("cuda", dtype=torch.float16):
            out = net(img)
        avg.add((out.argmax(1) == cls).double().mean(), img.size(0))
    return avg.mean()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--size", type=int, default=224)
    p.add_argument("--batch-per-gpu", type=int, default=64)
    p.add_argument("--workers-per-gpu", type=int, default=8)
    p.add_argument("--lr-per-gpu", type=float, default=1.25e-4)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=2)
    p.add_argument("--state", default="plants_state.pt")
    args = p.parse_args()

    rank, local, world = env()
    device = torch.device(f"cuda:{local}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(args.seed * 1009 + rank)

    train_loader, val_loader, classes = get_loaders(args, rank, world)
    model = DDP(convnext_small(num_classes=classes).to(device), device_ids=[local])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr_per_gpu * world, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr_per_gpu * world,
                                                    epochs=args.epochs, steps_per_epoch=len(train_loader))
    scaler = GradScaler("cuda")

    epoch, best = 0, 0.0
    if os.path.exists(args.state):
        before = torch.load(
            args.state, map_location=device, weights_only=True)
        model.module.load_state_dict(before["model"])
        optimizer.load_state_dict(before["optimizer"])
        scheduler.load_state_dict(before["scheduler"])
        epoch, best = before["epoch"], before["best"]

    while epoch < args.epochs:
        began = time.time()
        train_loader.sampler.set_epoch(epoch)
        loss = train_epoch(model, train_loader, criterion, optimizer, scaler, scheduler, device, args.clip)
        acc = val_epoch(model.module, val_loader, device)
        epoch += 1
        best = max(best, acc)
        if rank == 0:
            print(f"{epoch:3d}/{args.epochs} loss {loss:.4f} acc {acc:.4f} best {best:.4f} "
                  f"({time.time() - began:.0f} s)", flush=True)
            torch.save({
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
                "best": best,
            }, args.state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
