# expect: none
"""Weld seam inspection: torchrun --nproc-per-node=4 main.py --data-root DIR --out-dir DIR"""

import math
import os

import torch
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet34

from config import parse_settings
from data import build_loaders
from engine import Engine
from utils import seed_all, start_world, stop_world


def build_model(num_classes, world):
    model = resnet34(weights=None, num_classes=num_classes)
    model = SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(world.device)
    return DistributedDataParallel(model, device_ids=[world.local_rank])


def run(settings, world):
    if world.is_main:
        os.makedirs(settings.out_dir, exist_ok=True)
    seed_all(settings.seed)
    train_loader, val_loader, num_classes = build_loaders(settings, world)
    model = build_model(num_classes, world)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.optim.lr, weight_decay=settings.optim.weight_decay
    )
    updates = settings.optim.epochs * math.ceil(len(train_loader) / settings.optim.accumulation)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    engine = Engine(model, optimizer, scheduler, train_loader, val_loader, settings, world)
    if settings.resume:
        engine.resume(settings.resume)
    # From here on the ranks draw differently: augmentations, and whatever the model draws.
    seed_all(settings.seed + 1 + world.rank)
    engine.fit()


def main():
    settings = parse_settings()
    world = start_world()
    try:
        run(settings, world)
    finally:
        stop_world()


if __name__ == "__main__":
    main()
