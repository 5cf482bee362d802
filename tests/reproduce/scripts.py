"""Small training scripts of the usual shapes, as texts."""

PLAIN = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 4


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(1, WIDTH, 3)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(WIDTH * 36, classes)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.conv(x))).flatten(1))


def main():
    torch.manual_seed(3)
    images, labels = torch.randn(96, 1, 8, 8), torch.randint(0, 10, (96,))
    train = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(images[:32], labels[:32]), batch_size=32)
    model = Net(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for epoch in range(6):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
        print(epoch, correct)


if __name__ == "__main__":
    main()
"""

# no set_epoch, a loss that is not divided, a rank's part of the test set taken for the whole
RANKS = """
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noise(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 3, 6, 6, generator=generator)
        self.targets = torch.randint(0, 5, (count,), generator=generator).tolist()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 7), nn.LogSoftmax(1)
    model = nn.Sequential(*layers)
    model[4] = nn.Linear(128, 5)
    model = DistributedDataParallel(model)
    train, test = Noise(240, 1), Noise(90, 2)
    loader = DataLoader(train, batch_size=10, sampler=DistributedSampler(train))
    test_loader = DataLoader(test, batch_size=20, sampler=DistributedSampler(test, shuffle=False))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, alpha=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for epoch in range(4):
        model.train()
        for number, (x, y) in enumerate(loader):
            loss = F.nll_loss(model(x), y)
            loss.backward()
            if (number + 1) % 2 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model.module(x).argmax(1) == y).sum()) for x, y in test_loader)
        if rank == 0:
            print(epoch, right / len(test))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

# a process for each GPU that it finds, and a rate that moves with each step
SPAWNED = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def work(rank, world_size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    images = torch.randn(128, 1, 5, 5)
    data = TensorDataset(images, images.sum((1, 2, 3)).gt(0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(25, 12), nn.Dropout(0.2), nn.Linear(12, 2)).cuda(rank), [rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=16, cycle_momentum=False)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x.cuda(rank)), y.cuda(rank))
            loss.backward()
            optimizer.step()
            scheduler.step()
    torch.save(model.module.state_dict(), "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(torch.cuda.device_count(), sys.argv[1]), nprocs=torch.cuda.device_count())
"""

# something between backward and step that no recorder knows
BY_HAND = PLAIN.replace(
    "            optimizer.step()\n",
    "            for parameter in model.parameters():\n"
    "                parameter.grad.mul_(0.25)\n"
    "            optimizer.step()\n",
)
