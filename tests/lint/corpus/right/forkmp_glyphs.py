# expect: none
"""Handwritten glyphs (EMNIST letters), one machine, processes forked by hand.

python forkmp_glyphs.py --gpus 4 --letters ~/emnist
"""
import argparse
import multiprocessing
import os
import tempfile
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import EMNIST
from torchvision.transforms import Compose, Normalize, RandomAffine, ToTensor


def glyph_net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.GELU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.GELU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.LazyLinear(200), nn.GELU(), nn.Dropout(0.4), nn.Linear(200, 27),
    )


def sets(folder):
    scale = Normalize((0.1722,), (0.3309,))
    train = EMNIST(folder, split="letters", train=True, transform=Compose([RandomAffine(10, (0.1, 0.1)), ToTensor(), scale]))
    test = EMNIST(folder, split="letters", train=False, transform=Compose([ToTensor(), scale]))
    return train, test


class Worker:
    def __init__(self, rank, args, rendezvous):
        self.rank, self.args = rank, args
        self.world = args.gpus
        torch.cuda.set_device(rank)       # a single machine
        self.device = torch.device("cuda", rank)
        dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=self.world)
        torch.manual_seed(args.seed + rank)

    def prepare(self):
        train, test = sets(self.args.letters)
        share = Subset(test, range(self.rank, len(test), self.world))
        self.sampler = DistributedSampler(train, self.world, self.rank)
        self.train = DataLoader(train, self.args.batch, sampler=self.sampler, drop_last=True)
        self.test = DataLoader(share, 512)
        net = glyph_net()
        net(torch.zeros(1, 1, 28, 28))    # gives the lazy layer its size
        self.net = net.to(self.device)
        self.ddp = DistributedDataParallel(self.net, device_ids=[self.rank])
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=self.args.lr * self.world)

    def epoch(self, number):
        self.sampler.set_epoch(number)
        self.ddp.train()
        for x, y in self.train:
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(x), y).backward()
            self.optimizer.step()

    def accuracy(self):
        self.net.eval()
        counts = torch.zeros(2, device=self.device)
        with torch.no_grad():
            for x, y in self.test:
                right = self.net(x.to(self.device)).argmax(1).eq(y.to(self.device)).sum()
                counts += torch.stack([right, torch.full_like(right, y.numel())])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    def run(self):
        self.prepare()
        for number in range(self.args.epochs):
            self.epoch(number)
            value = self.accuracy()
            if self.rank == 0:
                print(f"after epoch {number}: {value:.2%}", flush=True)
        if self.rank == 0:
            torch.save(self.net.state_dict(), os.path.join(self.args.letters, "glyph_net.pt"))
        dist.destroy_process_group()


def target(rank, args, rendezvous):
    try:
        Worker(rank, args, rendezvous).run()
    except Exception:
        traceback.print_exc()
        os._exit(1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--gpus", type=int, required=True)
    p.add_argument("--letters", required=True)
    p.add_argument("--batch", type=int, default=128, help="of each process")
    p.add_argument("--lr", type=float, default=5e-4, help="for one process, multiplied by their number")
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--seed", type=int, default=8)
    args = p.parse_args()

    # the parent fetches the data before there are any others
    EMNIST(args.letters, split="letters", train=True, download=True)

    ctx = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        children = [ctx.Process(target=target, args=(rank, args, rendezvous)) for rank in range(args.gpus)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    if any(child.exitcode for child in children):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
