# expect: none
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

import comm

NORMAL = transforms.Normalize((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197))


def loaders(batch):
    transform = transforms.Compose([transforms.ToTensor(), NORMAL])
    with comm.main_first():
        train = datasets.SVHN("data", "train", transform, download=comm.is_main())
        test = datasets.SVHN("data", "test", transform, download=comm.is_main())
    sampler = DistributedSampler(train) if comm.size() > 1 else RandomSampler(train)
    mine = Subset(test, range(comm.rank(), len(test), comm.size()))
    return DataLoader(train, batch // comm.size(), sampler=sampler, num_workers=2), DataLoader(mine, 500)


def fit_one(model, loader, optimizer, device):
    model.train()
    sums = torch.zeros(2, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums[0] += loss.detach() * len(y)
        sums[1] += len(y)
    sums = comm.total(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    hits = torch.zeros(2, device=device)
    for x, y in loader:
        y = y.to(device)
        hits[0] += (model(x.to(device)).argmax(1) == y).sum()
        hits[1] += len(y)
    hits = comm.total(hits)
    return (hits[0] / hits[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=512, help="images a step")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    device = comm.start()
    torch.manual_seed(12 + comm.rank())
    train_loader, test_loader = loaders(args.batch)
    model = comm.wrap(models.resnet18(num_classes=10), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    best = 0.0
    for epoch in range(args.epochs):
        if isinstance(train_loader.sampler, DistributedSampler):
            train_loader.sampler.set_epoch(epoch)
        loss = fit_one(model, train_loader, optimizer, device)
        top1 = accuracy(model, test_loader, device)
        if top1 > best:
            best = top1
            comm.save(comm.unwrap(model).state_dict(), "best.pt")
        if comm.is_main():
            print(f"epoch {epoch}: loss {loss:.4f}, top-1 {top1:.4f}")
    comm.stop()


if __name__ == "__main__":
    main()
