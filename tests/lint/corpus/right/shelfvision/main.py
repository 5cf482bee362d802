# expect: none
"""Shelf product recognition: entry point.

    torchrun --nnodes=1 --nproc_per_node=4 main.py --workdir /mnt/jobs/$JOB_ID --index /mnt/shelf/index.json
"""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from checkpoint import CheckpointStore
from data import build_loaders
from engine import Engine


@dataclass
class Settings:
    workdir: str
    index: str
    epochs: int = 40
    batch_per_gpu: int = 64
    base_lr: float = 3e-4        # for 256 images in a step
    workers_per_gpu: int = 6
    seed: int = 99
    patience: int = 8


def settings_from_cli():
    p = argparse.ArgumentParser()
    p.add_argument("--workdir", required=True)
    p.add_argument("--index", required=True)
    p.add_argument("--epochs", type=int, default=Settings.epochs)
    p.add_argument("--batch-per-gpu", type=int, default=Settings.batch_per_gpu)
    return Settings(**vars(p.parse_args()))


def main():
    cfg = settings_from_cli()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    torch.manual_seed(cfg.seed + dist.get_rank())
    device = torch.device("cuda", local)

    train, val, test, n_products = build_loaders(cfg)
    store = CheckpointStore(cfg.workdir, device)
    engine = Engine(cfg, n_products, device, store)
    engine.fit(train, val)

    store.load_best(engine.net)
    acc = engine.accuracy(test)
    if dist.get_rank() == 0:
        print(f"test accuracy of the best model: {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
