# expect: scaler-not-saved line 115 or 96 or 101 or 104
"""Fine-grained birds, fp16 with gradient accumulation and clipping. Start with torchrun."""
import contextlib
import datetime
import os
import sys

import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

DEFAULTS = {
    "seed": 11,
    "epochs": 40,
    "micro_batch": 16,      # of each process
    "accumulate": 4,        # micro batches in one step
    "lr_per_image": 1e-5,   # times the images of a step, over all processes
    "max_norm": 1.0,
    "workers": 4,           # of each process
}


def read_config(path):
    with open(path) as f:
        return {**DEFAULTS, **yaml.safe_load(f)}


def make_data(cfg, rank, world):
    stats = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    tail = [transforms.ToTensor(), transforms.Normalize(*stats)]
    train = ImageFolder(os.path.join(cfg["root"], "train"),
                        transforms.Compose([transforms.RandomResizedCrop(384), transforms.RandomHorizontalFlip()] + tail))
    held = ImageFolder(os.path.join(cfg["root"], "test"),
                       transforms.Compose([transforms.Resize(440), transforms.CenterCrop(384)] + tail))
    sampler = DistributedSampler(train, seed=cfg["seed"])
    fetch = DataLoader(train, cfg["micro_batch"], sampler=sampler, num_workers=cfg["workers"], drop_last=True,
                       pin_memory=True)
    check = DataLoader(Subset(held, range(rank, len(held), world)), cfg["micro_batch"], num_workers=cfg["workers"])
    return sampler, fetch, check, len(train.classes)


def train_epoch(net, fetch, optimizer, scaler, criterion, cfg, device):
    net.train()
    window, batches = cfg["accumulate"], len(fetch)
    loss_sum = torch.zeros((), device=device)
    for i, (x, y) in enumerate(fetch):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        in_window = min(window, batches - i // window * window)
        step_now = (i + 1) % window == 0 or i + 1 == batches
        with contextlib.nullcontext() if step_now else net.no_sync():
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(net(x), y)
            scaler.scale(loss / in_window).backward()
        loss_sum += loss.detach()
        if step_now:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), cfg["max_norm"])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    loss_sum /= batches
    dist.all_reduce(loss_sum)
    return loss_sum.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(net, check, device):
    net.eval()
    good = torch.zeros(2, device=device)
    for x, y in check:
        x, y = x.to(device), y.to(device)
        good += torch.stack([(net(x).argmax(1) == y).sum(), (y >= 0).sum()])
    dist.all_reduce(good)
    return (good[0] / good[1]).item()


def main():
    cfg = read_config(sys.argv[1])
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=15))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg["seed"] * 1000 + rank)

    sampler, fetch, check, classes = make_data(cfg, rank, world)
    net = models.convnext_tiny(num_classes=classes).to(device)
    net = DDP(net, device_ids=[local])
    images_per_step = cfg["micro_batch"] * cfg["accumulate"] * world
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg["lr_per_image"] * images_per_step, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cfg["epochs"])
    scaler = torch.amp.GradScaler("cuda")
    criterion = torch.nn.CrossEntropyLoss()

    start_epoch, path = 0, os.path.join(cfg["output"], "last.ckpt")
    if os.path.exists(path):
        state = torch.load(path, map_location=device, weights_only=True)
        net.module.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        start_epoch = state["epoch"] + 1

    for epoch in range(start_epoch, cfg["epochs"]):
        sampler.set_epoch(epoch)
        loss = train_epoch(net, fetch, optimizer, scaler, criterion, cfg, device)
        schedule.step()
        accuracy = evaluate(net.module, check, device)
        if rank == 0:
            print(f"{epoch:3d}  loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)
            os.makedirs(cfg["output"], exist_ok=True)
            torch.save({
                "net": net.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "epoch": epoch,
            }, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
