# expect: no-sync-missing line 70 or 66 or 69
import argparse
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as T
from torchvision.datasets import STL10


@dataclass
class Config:
    root: str = "data"         # on each node's own disk
    out: str = "stl10"
    epochs: int = 80
    micro_batch: int = 32       # on each device
    accumulate: int = 2
    lr: float = 0.05            # at 256 images in a step
    seed: int = 5


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width), nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width))

    def forward(self, x):
        return F.gelu(x + self.body(x))


def network(classes=10):
    layers, width = [nn.Conv2d(3, 64, 5, 2, 2)], 64
    for nxt in (128, 256, 512):
        layers += [Residual(width), nn.Conv2d(width, nxt, 3, 2, 1)]
        width = nxt
    return nn.Sequential(*layers, Residual(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2),
                         nn.Linear(width, classes))


def get_data(fabric, cfg):
    if fabric.local_rank == 0:
        STL10(cfg.root, split="train", download=True)
    fabric.barrier()
    norm = T.Normalize((0.447, 0.44, 0.407), (0.26, 0.257, 0.271))
    train = STL10(cfg.root, "train", transform=T.Compose(
        [T.RandomCrop(96, 12), T.RandomHorizontalFlip(), T.ToTensor(), norm]))
    test = STL10(cfg.root, "test", transform=T.Compose([T.ToTensor(), norm]))
    part = Subset(test, range(fabric.global_rank, len(test), fabric.world_size))
    train = fabric.setup_dataloaders(
        DataLoader(train, cfg.micro_batch, shuffle=True, num_workers=4, drop_last=True))
    part = fabric.setup_dataloaders(DataLoader(part, 100, num_workers=4), use_distributed_sampler=False)
    return train, part


def fit_epoch(fabric, model, optimizer, loader, cfg):
    model.train()
    usable = len(loader) // cfg.accumulate * cfg.accumulate
    tail = len(loader) - usable
    losses = torch.zeros((), device=fabric.device)
    for i, (x, y) in enumerate(loader):
        parts = cfg.accumulate if i < usable else tail
        update = (i + 1) % cfg.accumulate == 0 or i + 1 == len(loader)
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss / parts)
        if update:
            optimizer.step()
            optimizer.zero_grad()
        losses += loss.detach()
    return fabric.all_reduce(losses / len(loader), reduce_op="mean").item()


@torch.no_grad()
def score(fabric, model, loader):
    model.eval()
    tally = torch.zeros(2, device=fabric.device)
    for x, y in loader:
        tally[0] += (model.module(x).argmax(1) == y).sum()
        tally[1] += y.numel()
    tally = fabric.all_reduce(tally, reduce_op="sum")
    return (tally[0] / tally[1]).item()


def main(cfg, devices, nodes):
    fabric = L.Fabric(accelerator="cuda", devices=devices, num_nodes=nodes, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(cfg.seed, workers=True)
    model = network()
    rate = cfg.lr * cfg.micro_batch * cfg.accumulate * fabric.world_size / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    model, optimizer = fabric.setup(model, optimizer)
    train, test = get_data(fabric, cfg)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.epochs)
    torch.manual_seed(cfg.seed + 1 + fabric.global_rank)

    for epoch in range(cfg.epochs):
        loss = fit_epoch(fabric, model, optimizer, train, cfg)
        schedule.step()
        accuracy = score(fabric, model, test)
        fabric.print(f"{epoch:>3} loss {loss:.4f} test {accuracy:.4f}")
    fabric.save(Path(cfg.out) / "final.ckpt", {"model": model})


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--devices", type=int, default=4)
    cli.add_argument("--nodes", type=int, default=1)
    cli.add_argument("--root", default=Config.root)
    given = cli.parse_args()
    main(Config(root=given.root), given.devices, given.nodes)
