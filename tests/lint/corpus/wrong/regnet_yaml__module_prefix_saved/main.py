# expect: none
"""Train a RegNet on an ImageFolder tree.

    torchrun --nproc_per_node=8 main.py --config configs/regnet_y.yaml --resume runs/a/last.pt
"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import get_model

from data import build_loaders
from engine import Engine


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--config", required=True)
    p.add_argument("--resume", default="")
    return p.parse_args()


def main():
    args = parse()
    with open(args.config) as fh:
        cfg = yaml.safe_load(fh)

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.manual_seed(cfg["seed"] + rank)

    # optim.lr in the yaml belongs to optim.reference_batch images per step
    per_gpu = cfg["data"]["batch_per_gpu"]
    lr = cfg["optim"]["lr"] * per_gpu * world / cfg["optim"]["reference_batch"]

    loaders = build_loaders(cfg["data"], rank, world)
    net = get_model(cfg["model"], weights=None, num_classes=cfg["data"]["classes"]).to(device)
    net = DistributedDataParallel(net, device_ids=[local_rank])
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9,
                                weight_decay=cfg["optim"]["wd"], nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cfg["epochs"])

    out = Path(cfg["out"])
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    engine = Engine(net, optimizer, scheduler, loaders, device, out, cfg["epochs"])
    if args.resume:
        engine.restore(args.resume)
    engine.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
