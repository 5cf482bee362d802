# expect: sync-each-step line 80
"""Rice varieties, compiled and in bf16.  torchrun --nproc_per_node=N compiled_rice.py <train> <val>"""
import os
import sys
from functools import wraps

import torch
import torch.distributed as dist
import torch.nn.functional as F
import wandb
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.models import resnet50
from torchvision.transforms import v2

CONFIG = {
    "epochs": 18,
    "batch_per_gpu": 128,
    "lr_per_gpu": 0.05,
    "warmup_epochs": 2,
    "smoothing": 0.1,
    "workers_per_gpu": 8,
    "seed": 4711,
}


def chief_only(fn):
    @wraps(fn)
    def inner(*args, **kwargs):
        if dist.get_rank() == 0:
            return fn(*args, **kwargs)
        return None
    return inner


@chief_only
def log(row, step):
    wandb.log(row, step=step)


@chief_only
def keep(net, path):
    torch.save(net.state_dict(), path)


def total_of(*values):
    packed = torch.stack([v.double() for v in values])
    dist.all_reduce(packed)
    return packed.tolist()


def image_folder(folder, train):
    ops = [v2.ToImage()]
    ops += [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()] if train else [v2.Resize(232), v2.CenterCrop(224)]
    ops += [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.118] * 3, [0.256] * 3)]
    return ImageFolder(folder, v2.Compose(ops))


def schedule(optimizer, steps):
    warm = CONFIG["warmup_epochs"] * steps
    rest = (CONFIG["epochs"] - CONFIG["warmup_epochs"]) * steps
    up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, 1.0, total_iters=warm)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=rest)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], milestones=[warm])


def epoch_of_training(model, loader, optimizer, lr_plan, device):
    model.train()
    loss_sum = torch.zeros((), device=device)
    seen = torch.zeros((), device=device)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), y, label_smoothing=CONFIG["smoothing"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        lr_plan.step()
        loss_sum += loss.item() * len(y)
        seen += len(y)
    loss_all, seen_all = total_of(loss_sum, seen)
    return loss_all / seen_all


@torch.no_grad()
def validation(net, loader, device):
    net.eval()
    right = torch.zeros((), device=device)
    seen = torch.zeros((), device=device)
    for x, y in loader:
        with torch.autocast("cuda", torch.bfloat16):
            guess = net(x.to(device)).argmax(1)
        right += (guess == y.to(device)).sum()
        seen += len(y)
    right_all, seen_all = total_of(right, seen)
    return right_all / seen_all


def main(train_dir, val_dir):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    torch.manual_seed(CONFIG["seed"] + rank)
    if rank == 0:
        wandb.init(project="rice", config=CONFIG | {"gpus": world})

    train_set, val_set = image_folder(train_dir, True), image_folder(val_dir, False)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, drop_last=True)
    n = CONFIG["workers_per_gpu"]
    loader = DataLoader(train_set, CONFIG["batch_per_gpu"], sampler=sampler, num_workers=n, drop_last=True,
                        pin_memory=True, persistent_workers=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), 256, num_workers=n)

    net = resnet50(num_classes=len(train_set.classes)).to(device, memory_format=torch.channels_last)
    model = torch.compile(DDP(net, device_ids=[local]))
    optimizer = torch.optim.SGD(net.parameters(), lr=CONFIG["lr_per_gpu"] * world, momentum=0.9,
                                weight_decay=1e-4)
    lr_plan = schedule(optimizer, len(loader))

    best = 0.0
    for epoch in range(CONFIG["epochs"]):
        sampler.set_epoch(epoch)
        loss = epoch_of_training(model, loader, optimizer, lr_plan, device)
        accuracy = validation(net, val_loader, device)
        log({"train/loss": loss, "val/accuracy": accuracy}, epoch)
        if accuracy > best:
            best = accuracy
            keep(net, "rice_best.pt")
    if rank == 0:
        wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
