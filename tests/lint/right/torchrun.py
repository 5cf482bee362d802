"""DDP started by torchrun: sums and counts, a checkpoint that resumes, mixed precision, accumulation."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.body(x))


def seed_worker(worker_id):
    import random

    random.seed(torch.initial_seed() % 2**32)


def train(model, loader, optimizer, scaler, device, accumulate):
    model.train()
    sums = torch.zeros(2, device=device)
    for i, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        update = (i + 1) % accumulate == 0 or i + 1 == len(loader)
        with nullcontext() if update else model.no_sync():
            with torch.autocast(device.type):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss / accumulate).backward()
        sums += torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))])
        if update:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(2, device=device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        right = (model(images).argmax(1) == labels).sum()
        sums += torch.stack([right, right.new_tensor(len(labels))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=256, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    if rank == 0:
        datasets.MNIST("data", train=True, download=True)
    dist.barrier()
    train_set = datasets.MNIST("data", train=True, transform=transform)
    test_set = datasets.MNIST("data", train=False, transform=transform)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(
        train_set, batch_size=args.batch_size // world_size, sampler=sampler, num_workers=4, worker_init_fn=seed_worker
    )
    own = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(own, batch_size=500)

    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net()).to(device)
    torch.manual_seed(1 + rank)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    scaler = torch.amp.GradScaler("cuda")
    start, best = 0, 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device, weights_only=True)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        scaler.load_state_dict(checkpoint["scaler"])
        start = checkpoint["epoch"] + 1

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        loss = train(model, train_loader, optimizer, scaler, device, args.accumulate)
        accuracy = evaluate(model.module, test_loader, device)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} accuracy {accuracy:.4f}")
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, "last.pt")
            if accuracy > best:
                best = accuracy
                torch.save(model.module.state_dict(), "best.pt")
    dist.barrier()
    weights = torch.load("best.pt", map_location="cpu", weights_only=True)
    model.module.load_state_dict(weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
