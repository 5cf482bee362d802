# expect: metric-unreduced line 45
"""MNIST on one machine: torchrun --nproc-per-node 4 mnist_torchrun.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(self.dropout(x))


def train(args, model, device, loader, optimizer, epoch, rank):
    model.train()
    total = torch.zeros(2, device=device)
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total[0] += loss.detach() * len(data)
        total[1] += len(data)
    if rank == 0:
        print(f"epoch {epoch}: training loss {(total[0] / total[1]).item():.4f}")


def test(model, device, loader, rank):
    model.eval()
    counts = torch.zeros(3, device=device)
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            counts[0] += F.cross_entropy(output, target, reduction="sum")
            counts[1] += (output.argmax(1) == target).sum()
            counts[2] += len(target)
    dist.all_reduce(counts)
    if rank == 0:
        loss, correct, seen = counts.tolist()
        print(f"test loss {loss / seen:.4f}, accuracy {100 * correct / seen:.2f}% of {seen:.0f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=256, help="images per step, over all processes")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(args.seed + rank)

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    if local_rank == 0:
        datasets.MNIST("data", train=True, download=True)
    dist.barrier()
    train_set = datasets.MNIST("data", train=True, transform=transform)
    test_set = datasets.MNIST("data", train=False, transform=transform)

    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True, seed=args.seed)
    train_loader = DataLoader(
        train_set, batch_size=args.batch_size // world_size, sampler=sampler, num_workers=2, pin_memory=True
    )
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, batch_size=1000, num_workers=2)

    model = DDP(Net().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(args, model, device, train_loader, optimizer, epoch, rank)
        test(model, device, test_loader, rank)
        scheduler.step()

    if rank == 0:
        torch.save(model.module.state_dict(), "mnist_cnn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
