# expect: group-before-init line 59 or 60
"""OneCycle, stepped once a batch, its length counted in batches of this process (each of which is one step of all)."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

EPOCHS = 24
BATCH = 512


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.GroupNorm(16, o), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(conv(width, width), conv(width, width))

    def forward(self, x):
        return x + self.inner(x)


def network():
    return nn.Sequential(
        conv(3, 64),
        conv(64, 128),
        nn.MaxPool2d(2),
        Residual(128),
        conv(128, 256),
        nn.MaxPool2d(2),
        Residual(256),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(int(os.environ["RANK"]))
    augment = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4, padding_mode="reflect"),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)),
        ]
    )
    dataset = datasets.CIFAR10("data", transform=augment)
    sampler = DistributedSampler(dataset, drop_last=True)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(dataset, BATCH // world_size, sampler=sampler, num_workers=4, drop_last=True)

    model = nn.parallel.DistributedDataParallel(network().cuda(), device_ids=[local_rank])
    optimizer = optim.SGD(model.parameters(), lr=0.4, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=EPOCHS * len(loader))
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "cifar.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
