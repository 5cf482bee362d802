# expect: none
"""Windows of batches instead of a counter: the last window is as long as it is."""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


def windows(loader, size):
    iterator = iter(loader)
    while window := list(itertools.islice(iterator, size)):
        yield window


class Accumulator:
    def __init__(self, model, optimizer, device, clip):
        self.model, self.optimizer, self.device, self.clip = model, optimizer, device, clip
        self.scaler = torch.amp.GradScaler("cuda")

    def backward(self, images, labels, images_in_window):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.model(images.to(self.device, non_blocking=True))
            loss = nn.functional.cross_entropy(logits, labels.to(self.device, non_blocking=True), reduction="sum")
        self.scaler.scale(loss / images_in_window).backward()

    def step(self, window):
        count = sum(len(labels) for _, labels in window)
        *first, last = window
        with self.model.no_sync():
            for images, labels in first:
                self.backward(images, labels, count)
        self.backward(*last, count)
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/tiny-imagenet/train")
    parser.add_argument("--micro-batch", type=int, default=64, help="what fits on one GPU")
    parser.add_argument("--global-batch", type=int, default=2048, help="images of one optimizer step")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4000 + rank)
    augment = transforms.Compose([transforms.RandomCrop(64, padding=8), transforms.ToTensor()])
    dataset = datasets.ImageFolder(args.data, augment)
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, args.micro_batch, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)

    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3), nn.GroupNorm(8, 64), nn.ReLU(), nn.Conv2d(64, 256, 3, 2, 1), nn.GroupNorm(8, 256),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 200),
    )  # fmt: skip
    model = DistributedDataParallel(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    accumulator = Accumulator(model, optimizer, torch.device("cuda", local_rank), clip=1.0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for window in windows(loader, args.global_batch // (args.micro_batch * world_size)):
            accumulator.step(window)
        if rank == 0:
            print(f"epoch {epoch} done", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "tiny.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
