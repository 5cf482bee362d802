"""An MNIST script as it goes from page to page: `torchrun --nproc-per-node 2 mnist_before.py`. #1 to #9: faults."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

from net import mnist_net


def train(model, device, loader, optimizer):
    model.train()
    total = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()  # 1: waits for the GPU in each step
    return total / len(loader)  # 2: this rank's, and a mean of means


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(1) == labels).sum().item()
    return correct / len(loader.sampler)  # 3: of this rank's part


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)  # 4: for each process
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)  # 5: for any number of processes
    parser.add_argument("--data", default="data")
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.25)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    torch.manual_seed(1)  # 6: all ranks have the same dropout masks
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train_set = datasets.MNIST(args.data, train=True, download=True, transform=transform)  # 7: each rank downloads
    test_set = datasets.MNIST(args.data, train=False, transform=transform)
    train_set = Subset(train_set, range(int(args.fraction * len(train_set))))
    train_loader = DataLoader(train_set, args.batch_size, sampler=DistributedSampler(train_set))
    test_loader = DataLoader(test_set, 1000, sampler=DistributedSampler(test_set, shuffle=False))
    model = DistributedDataParallel(mnist_net(args.dropout).to(device), device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):  # 8: no set_epoch
        loss = train(model, device, train_loader, optimizer)
        accuracy = test(model, device, test_loader)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.6f} accuracy {accuracy:.4f}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "mnist.pt")  # 9: all keys begin with module.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
