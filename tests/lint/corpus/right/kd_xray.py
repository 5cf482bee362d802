# expect: none
"""Distils a large chest X-ray classifier into a small one.

torchrun --nproc_per_node=4 kd_xray.py --config distill.yaml
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.models import densenet121, mobilenet_v3_large
from torchvision.transforms import v2 as T

DEFAULTS = {
    "epochs": 30,
    "batch_per_gpu": 48,
    "lr_per_gpu": 2.5e-4,      # the optimizer gets this times the number of GPUs
    "workers_per_gpu": 5,
    "temperature": 4.0,
    "alpha": 0.7,
    "seed": 11,
    "dropout": 0.2,
}


class Distiller:
    def __init__(self, teacher, student, temperature, alpha):
        self.teacher = teacher.eval().requires_grad_(False)
        self.student = student
        self.t = temperature
        self.alpha = alpha

    def loss(self, x, y):
        with torch.no_grad():
            wanted = F.softmax(self.teacher(x) / self.t, dim=1)
        logits = self.student(x)
        soft = F.kl_div(F.log_softmax(logits / self.t, dim=1), wanted, reduction="batchmean") * self.t ** 2
        return self.alpha * soft + (1 - self.alpha) * F.cross_entropy(logits, y)


def read_config():
    p = argparse.ArgumentParser()
    p.add_argument("--config", required=True)
    with open(p.parse_args().config) as f:
        return {**DEFAULTS, **yaml.safe_load(f)}


def make_sets(cfg):
    base = [T.Grayscale(3), T.Resize((256, 256)), T.ToImage(), T.ToDtype(torch.float32, scale=True)]
    norm = T.Normalize([0.5] * 3, [0.25] * 3)
    train = ImageFolder(os.path.join(cfg["root"], "train"), T.Compose(base + [T.RandomAffine(8, (0.05, 0.05)), norm]))
    val = ImageFolder(os.path.join(cfg["root"], "val"), T.Compose(base + [norm]))
    return train, val


def make_nets(cfg, n, device):
    teacher = densenet121(num_classes=n)
    teacher.load_state_dict(torch.load(cfg["teacher"], map_location="cpu", weights_only=True))
    student = mobilenet_v3_large(num_classes=n, dropout=cfg["dropout"])
    student = nn.SyncBatchNorm.convert_sync_batchnorm(student)
    return teacher.to(device), student.to(device)


def balanced_accuracy(net, loader, n, device):
    net.eval()
    table = torch.zeros(n, n, device=device)
    with torch.no_grad():
        for x, y in loader:
            guess = net(x.to(device)).argmax(1)
            table.index_put_((y.to(device), guess), torch.ones_like(guess, dtype=torch.float), accumulate=True)
    dist.all_reduce(table)
    per_class = table.diag() / table.sum(1).clamp(min=1)
    return per_class.mean().item()


def main():
    cfg = read_config()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(cfg["seed"] + rank)

    train_set, val_set = make_sets(cfg)
    n = len(train_set.classes)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, seed=cfg["seed"])
    train = DataLoader(train_set, batch_size=cfg["batch_per_gpu"], sampler=sampler,
                       num_workers=cfg["workers_per_gpu"], pin_memory=True, drop_last=True)
    val = DataLoader(Subset(val_set, range(rank, len(val_set), world)),
                     batch_size=cfg["batch_per_gpu"], num_workers=cfg["workers_per_gpu"])

    teacher, small = make_nets(cfg, n, device)
    student = DDP(small, device_ids=[local_rank])
    distiller = Distiller(teacher, student, cfg["temperature"], cfg["alpha"])
    optimizer = torch.optim.AdamW(student.parameters(), lr=cfg["lr_per_gpu"] * world, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg["epochs"])

    best = 0.0
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        student.train()
        for x, y in train:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = distiller.loss(x, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        schedule.step()
        value = balanced_accuracy(small, val, n, device)
        if rank == 0:
            print(f"{epoch}: balanced accuracy {value:.4f}")
            if value > best:
                torch.save(small.state_dict(), os.path.join(cfg["out"], "student.pt"))
        best = max(best, value)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
