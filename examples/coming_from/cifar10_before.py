"""A CIFAR-10 script by mp.spawn as it goes from page to page: `python cifar10_before.py`. #1 to #9: faults."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"  # 1: a second job on this machine can't start
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def evaluate(model, loader, device):
    model.eval()
    right = count = 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            right += (model(images).argmax(1) == labels).sum().item()
            count += len(labels)
    return right / count  # 2: of this rank's part of the test set


def train(rank, world_size, args):
    setup(rank, world_size)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    normalise = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    transform = transforms.Compose([transforms.ToTensor(), normalise])
    train_set = datasets.CIFAR10(args.data, train=True, download=True, transform=transform)  # 3: each rank downloads
    test_set = datasets.CIFAR10(args.data, train=False, download=True, transform=transform)
    part = Subset(train_set, range(int(args.fraction * len(train_set))))  # 4: "a random part" is the first one
    train_loader = DataLoader(part, args.batch_size, sampler=DistributedSampler(part))  # 5: the batch is each process's
    test_loader = DataLoader(test_set, 256, sampler=DistributedSampler(test_set, shuffle=False))
    model = models.resnet18(num_classes=10).to(device)  # 6: batch norm over a process's own images
    model = DistributedDataParallel(model, device_ids=[rank] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(1, args.epochs + 1):  # 7: no set_epoch
        model.train()
        total = 0.0
        for step, (images, labels) in enumerate(train_loader, start=1):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()  # 8: waits for the GPU in each step
            print(f"\rrank {rank} epoch {epoch} step {step} loss {total / step:.4f}", end="")  # 9: N progress lines
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(f"\nepoch {epoch}: loss {total / len(train_loader):.6f} accuracy {accuracy:.4f}")
    cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--data", default="data")
    parser.add_argument("--fraction", type=float, default=0.25)
    args = parser.parse_args()
    mp.spawn(train, args=(args.nproc, args), nprocs=args.nproc)
