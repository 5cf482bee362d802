# expect: train-forgotten line 80 or 53 or 81 or 83 or 101 or 115 or 116 or 118
"""Fine-grained birds (CUB layout: root/train/<class>, root/val/<class>).

torchrun --nproc_per_node=8 birds_trainer.py /data/cub --out runs/$(date +%s)
"""
import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

NORM = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.start_epoch = 0
        self.best = 0.0
        self.build_data()
        self.build_model()
        if args.resume:
            self.restore(args.resume)

    def build_data(self):
        a = self.args
        aug = T.Compose([T.RandomResizedCrop(320), T.RandomHorizontalFlip(), T.ToTensor(), NORM])
        plain = T.Compose([T.Resize(360), T.CenterCrop(320), T.ToTensor(), NORM])
        train = ImageFolder(os.path.join(a.root, "train"), aug)
        val = ImageFolder(os.path.join(a.root, "val"), plain)
        self.sampler = DistributedSampler(train, shuffle=True)
        self.train_loader = DataLoader(train, a.batch, sampler=self.sampler, num_workers=a.workers,
                                       pin_memory=True, drop_last=True)
        mine = Subset(val, list(range(self.rank, len(val), self.world)))
        self.val_loader = DataLoader(mine, a.batch, num_workers=a.workers, pin_memory=True)
        self.n_classes = len(train.classes)

    def build_model(self):
        net = models.convnext_tiny(weights=None)
        net.classifier[2] = nn.Linear(net.classifier[2].in_features, self.n_classes)
        net.to(self.device)
        net.train()
        self.model = DDP(net, device_ids=[self.device.index])
        lr = self.args.lr * self.world
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=self.args.epochs)
        self.scaler = torch.cuda.amp.GradScaler()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def restore(self, path):
        ckpt = torch.load(path, map_location=self.device, weights_only=True)
        self.model.module.load_state_dict(ckpt["model"])
        self.optimizer.load_state_dict(ckpt["optimizer"])
        self.scheduler.load_state_dict(ckpt["scheduler"])
        self.scaler.load_state_dict(ckpt["scaler"])
        self.start_epoch = ckpt["epoch"] + 1
        self.best = ckpt["best"]

    def snapshot(self, epoch, name):
        torch.save({
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": epoch,
            "best": self.best,
        }, Path(self.args.out) / name)

    def train_one_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        total = torch.zeros(2, device=self.device)
        for images, labels in self.train_loader:
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.criterion(self.model(images), labels)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total[0] += loss.detach() * labels.numel()
            total[1] += labels.numel()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    @torch.no_grad()
    def validate(self):
        net = self.model.module.eval()
        hits = torch.zeros((), device=self.device)
        seen = torch.zeros((), device=self.device)
        for images, labels in self.val_loader:
            images, labels = images.to(self.device), labels.to(self.device)
            with torch.autocast("cuda", dtype=torch.float16):
                logits = net(images)
            hits += (logits.argmax(-1) == labels).sum()
            seen += labels.numel()
        dist.all_reduce(hits)
        dist.all_reduce(seen)
        return (hits / seen).item()

    def run(self):
        for epoch in range(self.start_epoch, self.args.epochs):
            loss = self.train_one_epoch(epoch)
            self.scheduler.step()
            acc = self.validate()
            improved = acc > self.best
            self.best = max(self.best, acc)
            if self.rank == 0:
                print(f"[{epoch:03d}] loss={loss:.4f} val={acc:.4f} best={self.best:.4f}")
                self.snapshot(epoch, "last.pt")
                if improved:
                    self.snapshot(epoch, "best.pt")
            if not math.isfinite(loss):
                break


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--out", required=True)
    p.add_argument("--resume")
    p.add_argument("--epochs", type=int, default=60)
    p.add_argument("--batch", type=int, default=32, help="images per GPU")
    p.add_argument("--lr", type=float, default=5e-5, help="for one GPU, multiplied by their number")
    p.add_argument("--workers", type=int, default=6, help="loader workers per GPU")
    p.add_argument("--clip", type=float, default=1.0)
    return p.parse_args()


def main():
    args = parse()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    torch.manual_seed(17 + dist.get_rank())
    if dist.get_rank() == 0:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    try:
        Trainer(args).run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
