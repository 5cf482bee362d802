# expect: batch-not-divided line 42
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import Flowers102

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get_loaders(opt, rank, world_size):
    tf_train = transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(0.2, 0.2, 0.2),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ])
    tf_val = transforms.Compose([
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ])
    train = Flowers102(opt.root, split="train", transform=tf_train)
    val = Flowers102(opt.root, split="val", transform=tf_val)
    sampler = DistributedSampler(train, num_replicas=world_size, rank=rank, shuffle=True, seed=opt.seed)
    train_dl = DataLoader(train, batch_size=opt.batch, sampler=sampler,
                          num_workers=opt.workers // world_size, pin_memory=True)
    val_part = Subset(val, list(range(rank, len(val), world_size)))
    val_dl = DataLoader(val_part, batch_size=64, num_workers=opt.workers // world_size)
    return train_dl, val_dl


def validate(model, val_dl, rank):
    model.eval()
    right = torch.zeros((), device=rank, dtype=torch.long)
    total = torch.zeros((), device=rank, dtype=torch.long)
    with torch.inference_mode():
        for x, y in val_dl:
            x, y = x.to(rank), y.to(rank)
            right += model(x).argmax(dim=1).eq(y).sum()
            total += y.numel()
    dist.all_reduce(right)
    dist.all_reduce(total)
    return 100.0 * right.item() / total.item()


def worker(rank, world_size, port, opt):
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    torch.manual_seed(opt.seed + rank)

    train_dl, val_dl = get_loaders(opt, rank, world_size)
    net = models.resnet34(num_classes=102)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(rank)
    net = DistributedDataParallel(net, device_ids=[rank])
    criterion = nn.CrossEntropyLoss()
    optim = torch.optim.SGD(net.parameters(), lr=opt.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=opt.epochs)

    best = 0.0
    for epoch in range(opt.epochs):
        train_dl.sampler.set_epoch(epoch)
        net.train()
        for x, y in train_dl:
            x, y = x.to(rank, non_blocking=True), y.to(rank, non_blocking=True)
            optim.zero_grad()
            criterion(net(x), y).backward()
            optim.step()
        scheduler.step()
        acc = validate(net.module, val_dl, rank)
        if rank == 0:
            print(f"[{epoch + 1}/{opt.epochs}] val acc {acc:.2f}%")
            if acc > best:
                torch.save(net.module.state_dict(), os.path.join(opt.save_dir, "flowers_best.pth"))
        best = max(best, acc)

    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="./data")
    parser.add_argument("--save-dir", default="./ckpt")
    parser.add_argument("--batch", type=int, default=64, help="images of all processes in a step together")
    parser.add_argument("--workers", type=int, default=8, help="loader workers on this machine")
    parser.add_argument("--lr", type=float, default=0.01, help="tuned for --batch")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    opt = parser.parse_args()
    os.makedirs(opt.save_dir, exist_ok=True)
    for part in ("train", "val"):
        Flowers102(opt.root, split=part, download=True)
    gpus = torch.cuda.device_count()
    mp.spawn(worker, args=(gpus, free_port(), opt), nprocs=gpus)
