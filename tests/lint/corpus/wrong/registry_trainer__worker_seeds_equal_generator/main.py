# expect: none
"""Entry point: torchrun --nproc_per_node=8 main.py config.json"""
import json
import os
import sys

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from data import build_loaders
from engine import evaluate, train_epoch
from registry import MODELS, OPTIMIZERS

DEFAULTS = {
    "model": "resnet50", "num_classes": 1000, "optimizer": "sgd",
    "base_lr": 0.1, "base_batch": 256,          # linear rule: base_lr belongs to base_batch
    "batch_per_gpu": 64, "workers_per_gpu": 6,
    "epochs": 90, "warmup_epochs": 5, "seed": 11,
}


def load_config(path):
    with open(path) as f:
        cfg = {**DEFAULTS, **json.load(f)}
    for key in ("data", "workdir"):
        if key not in cfg:
            raise KeyError(f"{path} has no {key!r}")
    return cfg


def warmup_cosine(optimizer, cfg):
    warm, total = cfg["warmup_epochs"], cfg["epochs"]
    first = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warm)
    second = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warm)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[warm])


def run(cfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    train_loader, val_loader = build_loaders(cfg, rank, world)

    torch.manual_seed(cfg["seed"])
    model = MODELS[cfg["model"]](cfg["num_classes"])
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    torch.manual_seed(cfg["seed"] * 1000 + rank)

    lr = cfg["base_lr"] * cfg["batch_per_gpu"] * world / cfg["base_batch"]
    optimizer = OPTIMIZERS[cfg["optimizer"]](model.parameters(), lr)
    scheduler = warmup_cosine(optimizer, cfg)
    scaler = torch.amp.GradScaler("cuda")

    bundle = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    latest = os.path.join(cfg["workdir"], "latest.pt")
    start, best = checkpoint.restore(latest, bundle, device)

    for epoch in range(start, cfg["epochs"]):
        train_loader.sampler.set_epoch(epoch)
        loss = train_epoch(model, train_loader, optimizer, scaler, device)
        scheduler.step()
        top1 = evaluate(model.module, val_loader, device)
        improved = top1 > best
        best = max(best, top1)
        if rank == 0:
            print(f"[{epoch + 1}/{cfg['epochs']}] loss {loss:.4f} top1 {top1:.2f} best {best:.2f}")
            checkpoint.store(latest, bundle, epoch + 1, best)
            if improved:
                torch.save(model.module.state_dict(), os.path.join(cfg["workdir"], "best.pt"))


def main():
    cfg = load_config(sys.argv[1])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    if torch.distributed.get_rank() == 0:
        os.makedirs(cfg["workdir"], exist_ok=True)
    try:
        run(cfg)
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
