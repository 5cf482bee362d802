# expect: none
# Assignment 3, part b: train a small CNN on FashionMNIST with all GPUs of ONE machine (mp.spawn + DDP)
import argparse
import os
import random
import socket

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self, p_drop=0.25):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.drop = nn.Dropout(p_drop)
        self.fc1 = nn.Linear(64 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.drop(torch.flatten(x, 1))
        return self.fc2(self.drop(F.relu(self.fc1(x))))


def find_free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Trainer:
    def __init__(self, rank, world_size, args):
        self.rank, self.world_size, self.args = rank, world_size, args
        self.device = torch.device(f"cuda:{rank}")  # single machine, so the rank is the local rank too
        self.build_data()
        net = Net().to(self.device)
        self.model = DistributedDataParallel(net, device_ids=[rank])
        # batch_size is per GPU, so the effective batch grows with the GPUs -> linear scaling rule
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr * world_size, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=5, gamma=0.3)
        self.start_epoch = 0
        self.ckpt_path = os.path.join(args.save_dir, "checkpoint.pth")
        if args.resume:
            self.load_checkpoint()

    def build_data(self):
        norm = [transforms.ToTensor(), transforms.Normalize((0.2860,), (0.3530,))]
        train_tf = transforms.Compose([transforms.RandomCrop(28, padding=2), transforms.RandomHorizontalFlip(), *norm])
        train_set = datasets.FashionMNIST(self.args.data, train=True, transform=train_tf)
        test_set = datasets.FashionMNIST(self.args.data, train=False, transform=transforms.Compose(norm))
        self.sampler = DistributedSampler(train_set, num_replicas=self.world_size, rank=self.rank)
        self.train_loader = DataLoader(train_set, self.args.batch_size, sampler=self.sampler, num_workers=2)
        mine = list(range(self.rank, len(test_set), self.world_size))
        self.test_loader = DataLoader(Subset(test_set, mine), 512, shuffle=False, num_workers=2)

    def load_checkpoint(self):
        ckpt = torch.load(self.ckpt_path, map_location=self.device, weights_only=True)
        self.model.module.load_state_dict(ckpt["net"])
        self.optimizer.load_state_dict(ckpt["optim"])
        self.scheduler.load_state_dict(ckpt["sched"])
        self.start_epoch = ckpt["epoch"] + 1

    def save_checkpoint(self, epoch):
        torch.save(
            {
                "net": self.model.module.state_dict(),
                "optim": self.optimizer.state_dict(),
                "sched": self.scheduler.state_dict(),
                "epoch": epoch,
            },
            self.ckpt_path,
        )

    def run_epoch(self):
        self.model.train()
        loss_sum = torch.zeros(1, device=self.device)
        n = 0
        for x, y in self.train_loader:
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.detach() * len(y)
            n += len(y)
        stats = torch.cat([loss_sum, torch.tensor([float(n)], device=self.device)])
        dist.all_reduce(stats, op=dist.ReduceOp.SUM)
        return (stats[0] / stats[1]).item()

    @torch.no_grad()
    def test(self):
        self.model.eval()
        stats = torch.zeros(2, device=self.device)
        for x, y in self.test_loader:
            x, y = x.to(self.device), y.to(self.device)
            stats[0] += (self.model.module(x).argmax(1) == y).sum()
            stats[1] += len(y)
        dist.all_reduce(stats, op=dist.ReduceOp.SUM)
        return (stats[0] / stats[1]).item()

    def fit(self):
        for epoch in range(self.start_epoch, self.args.epochs):
            self.sampler.set_epoch(epoch)
            train_loss = self.run_epoch()
            test_acc = self.test()
            self.scheduler.step()
            if self.rank == 0:
                print(f"[{epoch + 1}/{self.args.epochs}] loss={train_loss:.4f} acc={100 * test_acc:.2f}%")
                self.save_checkpoint(epoch)


def worker(rank, world_size, port, args):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)

    # different dropout / crops on each rank; DDP copies the weights of rank 0 to the others
    seed = args.seed + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

    trainer = Trainer(rank, world_size, args)
    trainer.fit()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="./data")
    parser.add_argument("--save_dir", required=True)
    parser.add_argument("--batch_size", type=int, default=64, help="per GPU")
    parser.add_argument("--lr", type=float, default=0.01, help="for one GPU")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    os.makedirs(args.save_dir, exist_ok=True)
    datasets.FashionMNIST(args.data, download=True)  # once, before there are any workers
    world_size = torch.cuda.device_count()
    mp.spawn(worker, args=(world_size, find_free_port(), args), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
