# expect: no-destroy line 70 or 65 or 110 or 111
"""Tutorial, part 3: the Fashion-MNIST classifier on all the GPUs of one machine.

    torchrun --standalone --nproc_per_node=4 tut_fashion_cnn.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

EPOCHS = 12
BATCH_PER_GPU = 128
LR_ONE_GPU = 0.02      # found with one GPU and 128 images; scaled below
DATA = "./data"


class FashionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.fc1 = nn.Linear(64 * 7 * 7, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.drop(F.relu(self.fc1(x.flatten(1))))
        return self.fc2(x)


def get_data(rank):
    tf = transforms.Compose([
        transforms.ToTensor(),
        transforms.Normalize((0.2860,), (0.3530,)),
    ])
    if rank == 0:
        datasets.FashionMNIST(DATA, train=True, download=True)
        datasets.FashionMNIST(DATA, train=False, download=True)
    dist.barrier()
    train = datasets.FashionMNIST(DATA, train=True, transform=tf)
    test = datasets.FashionMNIST(DATA, train=False, transform=tf)
    return train, test


def test_accuracy(net, loader, device):
    net.eval()
    hits = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            hits[0] += (net(x).argmax(1) == y).sum()
            hits[1] += y.numel()
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    # Step 1: join the group that torchrun has prepared
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    # Step 2: each process its own random numbers; DDP sends rank 0's weights to all
    torch.manual_seed(1234 + rank)

    # Step 3: the data, a part for each process
    train, test = get_data(rank)
    train_sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    train_dl = DataLoader(train, batch_size=BATCH_PER_GPU, sampler=train_sampler,
                          num_workers=2, pin_memory=True, drop_last=True)
    test_part = Subset(test, range(rank, len(test), world))
    test_dl = DataLoader(test_part, batch_size=256, num_workers=2)

    # Step 4: the model
    model = DistributedDataParallel(FashionNet().to(device), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=LR_ONE_GPU * world, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=5, gamma=0.2)

    # Step 5: train
    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(2, device=device)
        for x, y in train_dl:
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running[0] += loss.detach() * y.size(0)
            running[1] += y.size(0)
        sched.step()
        dist.all_reduce(running)
        accuracy = test_accuracy(model.module, test_dl, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {running[0] / running[1]:.4f}, test accuracy {accuracy:.4f}")

    # Step 6: keep the weights
    if rank == 0:
        torch.save(model.module.state_dict(), "fashion_cnn.pt")


if __name__ == "__main__":
    main()
