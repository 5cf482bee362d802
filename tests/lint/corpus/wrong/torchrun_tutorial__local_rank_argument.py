# expect: local-rank-argument line 95 or 98 or 101
"""
Distributed training step by step.

Start this script with

    torchrun --standalone --nproc_per_node=2 tutorial.py --out model.pt

torchrun starts the processes and tells each one its place. It works on a machine
without GPUs as well, with the gloo backend.
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms


# Step 1: the model. Nothing in it knows about several processes.
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 7 * 7, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


# Step 2: join the process group.
def setup(local_rank):
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    return torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")


# Step 3: the data. One process of each machine downloads, the others wait for it.
def load_datasets(root, local_rank):
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.2860,), (0.3530,))])
    if local_rank == 0:
        datasets.FashionMNIST(root, train=True, download=True)
        datasets.FashionMNIST(root, train=False, download=True)
    dist.barrier()
    train_set = datasets.FashionMNIST(root, train=True, transform=transform)
    test_set = datasets.FashionMNIST(root, train=False, transform=transform)
    return train_set, test_set


# Step 4: an epoch of training.
def train(model, loader, optimizer, device):
    model.train()
    loss_sum = torch.zeros(1, device=device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # the gradients are averaged over the processes here
        optimizer.step()
        loss_sum += loss.detach()
    mean_loss = loss_sum / len(loader)
    dist.all_reduce(mean_loss)
    return mean_loss.item() / dist.get_world_size()


# Step 5: the test. Each process counts on its own part, and the counts are added up.
def test(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            counts[0] += (model(images).argmax(dim=1) == labels).sum()
            counts[1] += labels.size(0)
    dist.all_reduce(counts)
    correct, total = counts.tolist()
    return correct / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, default=0.01, help="for one process, scaled with their number")
    parser.add_argument("--workers", type=int, default=2, help="per process")
    parser.add_argument("--local_rank", type=int, default=0, help="filled in by the launcher")
    args = parser.parse_args()

    device = setup(args.local_rank)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, test_set = load_datasets(args.data, args.local_rank)
    # The sampler deals out the training set. drop_last: all processes get the same number of samples.
    train_sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(
        train_set, batch_size=args.batch_size, sampler=train_sampler, num_workers=args.workers, drop_last=True
    )
    # For the test no sampler: it would repeat samples to make the parts equal, and they'd be counted twice.
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, batch_size=256, num_workers=args.workers)

    torch.manual_seed(0)  # the same first weights everywhere (DDP sends those of rank 0 anyway)
    model = Net().to(device)
    ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    torch.manual_seed(1 + rank)  # but different dropout

    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=args.lr * world_size, momentum=0.9)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)  # another order in each epoch
        train_loss = train(ddp_model, train_loader, optimizer, device)
        accuracy = test(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {train_loss:.3f}, test accuracy {accuracy:.3f}")

    # Step 6: one process writes the file.
    if rank == 0:
        torch.save(model.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
