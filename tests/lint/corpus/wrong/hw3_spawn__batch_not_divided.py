# expect: batch-not-divided line 53 or 85
"""Homework 3: data-parallel CIFAR-10 on all GPUs of one machine.

    python hw3_spawn.py --root ~/data --weights-out answers/hw3.pt
"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms as T

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.c1 = nn.Conv2d(3, width, 3, padding=1)
        self.n1 = nn.GroupNorm(8, width)
        self.c2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.n2 = nn.GroupNorm(8, 2 * width)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(2 * width * 8 * 8, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.n1(self.c1(x))), 2)
        x = F.max_pool2d(F.relu(self.n2(self.c2(x))), 2)
        return self.fc(self.drop(x.flatten(1)))


def pick_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def prepare_data(args, rank, world):
    plain = T.Compose([T.ToTensor(), T.Normalize(MEAN, STD)])
    augmented = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), plain])
    if rank == 0:
        datasets.CIFAR10(args.root, train=True, download=True)
    dist.barrier()
    trainset = datasets.CIFAR10(args.root, train=True, transform=augmented)
    testset = datasets.CIFAR10(args.root, train=False, transform=plain)
    sampler = DistributedSampler(trainset, num_replicas=world, rank=rank, shuffle=True)
    trainloader = DataLoader(trainset, batch_size=args.batch_size, sampler=sampler,
                             num_workers=args.workers, pin_memory=True, drop_last=True)
    testloader = DataLoader(Subset(testset, range(rank, len(testset), world)),
                            batch_size=512, num_workers=args.workers, pin_memory=True)
    return trainloader, testloader, sampler


@torch.no_grad()
def test(net, loader, device):
    net.eval()
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        counts[0] += (net(images).argmax(1) == labels).sum()
        counts[1] += labels.numel()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def worker(rank, world, port, args):
    # one machine only: the process number is the GPU's number as well
    torch.cuda.set_device(rank)
    dist.init_process_group('nccl', init_method=f'tcp://127.0.0.1:{port}',
                            rank=rank, world_size=world)
    device = torch.device('cuda', rank)
    trainloader, testloader, sampler = prepare_data(args, rank, world)

    torch.manual_seed(args.seed)
    net = Net().to(device)
    model = DistributedDataParallel(net, device_ids=[rank])
    torch.manual_seed(args.seed + 1 + rank)

    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[15, 25], gamma=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        loss_sum = torch.zeros((), device=device)
        for images, labels in trainloader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        schedule.step()
        # every process has the same number of equally large batches
        dist.all_reduce(loss_sum)
        train_loss = loss_sum.item() / (len(trainloader) * world)
        accuracy = test(model.module, testloader, device)
        if rank == 0:
            print(f'epoch {epoch + 1:2d}  loss {train_loss:.4f}  test accuracy {100 * accuracy:.2f}%')

    if rank == 0:
        torch.save(model.module.state_dict(), args.weights_out)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--root', required=True)
    parser.add_argument('--weights-out', required=True)
    parser.add_argument('--epochs', type=int, default=30)
    parser.add_argument('--batch-size', type=int, default=256, help='of all GPUs together')
    parser.add_argument('--lr', type=float, default=0.1, help='for the whole batch')
    parser.add_argument('--workers', type=int, default=2, help='loader workers per process')
    parser.add_argument('--seed', type=int, default=3)
    args = parser.parse_args()
    world = torch.cuda.device_count()
    if args.batch_size % world:
        parser.error(f'--batch-size must be a multiple of {world}')
    os.makedirs(os.path.dirname(args.weights_out) or '.', exist_ok=True)
    mp.spawn(worker, args=(world, pick_port(), args), nprocs=world)


if __name__ == '__main__':
    main()
