# expect: none
"""Gradient accumulation: ranks exchange gradients once per optimizer step, and the last, shorter window counts too."""

import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def build_loader(args):
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(160),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    dataset = datasets.ImageFolder(args.data, transform)
    sampler = DistributedSampler(dataset, shuffle=True)
    per_rank = args.batch_size // (dist.get_world_size() * args.accumulate)
    return DataLoader(dataset, batch_size=per_rank, sampler=sampler, num_workers=4, drop_last=True), sampler


def train_epoch(model, loader, optimizer, criterion, device, accumulate):
    model.train()
    optimizer.zero_grad()
    batches = len(loader)
    for i, (images, labels) in enumerate(loader):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        last = (i + 1) % accumulate == 0 or i + 1 == batches
        begun = i - i % accumulate
        window = min(accumulate, batches - begun)  # the last window may be shorter
        with contextlib.nullcontext() if last else model.no_sync():
            loss = criterion(model(images), labels) / window
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--batch-size", type=int, default=1024, help="images per optimizer step on all GPUs")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.4)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(7 + dist.get_rank())

    loader, sampler = build_loader(args)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(models.resnet34(num_classes=100)).to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[15, 25])
    if dist.get_rank() == 0:
        print(f"{math.ceil(len(loader) / args.accumulate)} optimizer steps an epoch")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, criterion, device, args.accumulate)
        scheduler.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "resnet34.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
