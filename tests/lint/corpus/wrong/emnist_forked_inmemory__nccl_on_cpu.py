# expect: nccl-on-cpu line 84 or 77 or 102 or 103
"""EMNIST letters, decoded once into memory and shared with forked workers (copy on write).

    python emnist_forked_inmemory.py --procs 4 --device cuda --out DIR
"""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import EMNIST


def read(root, train):
    ds = EMNIST(root, split="letters", train=train, download=True)  # the parent is alone when it does this
    return ds.data.unsqueeze(1), ds.targets - 1


def statistics(pixels):
    values = pixels[:20000].float() / 255
    return values.mean(), values.std()


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 49, 256), nn.ReLU(), nn.Dropout(0.4), nn.Linear(256, 26),
    )  # fmt: skip


def jitter(x):
    """Shift the batch by up to two pixels (draws from the process's own generator)."""
    dx, dy = torch.randint(-2, 3, (2,)).tolist()
    return torch.roll(x, (dx, dy), dims=(2, 3))


class Runner:
    def __init__(self, rank, opts, train, test, mean, std):
        self.rank, self.opts = rank, opts
        self.device = torch.device("cuda", rank) if opts.device == "cuda" else torch.device("cpu")
        if opts.device == "cuda":
            torch.cuda.set_device(self.device)
        self.mean, self.std = mean.to(self.device), std.to(self.device)
        torch.manual_seed(opts.seed + rank)

        self.sampler = DistributedSampler(train, num_replicas=opts.procs, rank=rank, seed=opts.seed)
        self.train_loader = DataLoader(train, opts.batch // opts.procs, sampler=self.sampler, drop_last=True)
        self.test_loader = DataLoader(Subset(test, range(rank, len(test), opts.procs)), 1000)

        ids = [rank] if opts.device == "cuda" else None
        self.model = DDP(make_net().to(self.device), device_ids=ids)
        self.opt = optim.Adam(self.model.parameters(), lr=opts.lr)
        self.sched = optim.lr_scheduler.ExponentialLR(self.opt, gamma=0.9)

    def inputs(self, x, y):
        return (x.to(self.device).float() / 255 - self.mean) / self.std, y.to(self.device)

    def train(self):
        self.model.train()
        for x, y in self.train_loader:
            x, y = self.inputs(jitter(x), y)
            self.opt.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.opt.step()
        self.sched.step()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        tally = torch.zeros(3)
        for x, y in self.test_loader:
            x, y = self.inputs(x, y)
            scores = self.model.module(x)
            tally[0] += nn.functional.cross_entropy(scores, y, reduction="sum").cpu()
            tally[1] += (scores.argmax(1) == y).sum().cpu()
            tally[2] += len(y)
        dist.all_reduce(tally)
        return (tally[0] / tally[2]).item(), (tally[1] / tally[2]).item()

    def run(self):
        best = 0.0
        for epoch in range(self.opts.epochs):
            self.sampler.set_epoch(epoch)
            self.train()
            loss, acc = self.evaluate()
            if self.rank == 0:
                print(f"{epoch:2d}: test loss {loss:.4f}, accuracy {acc:.4f}", flush=True)
                if acc > best:
                    torch.save(self.model.module.state_dict(), os.path.join(self.opts.out, "letters.pt"))
            best = max(best, acc)


def child(rank, rendezvous, opts, *data):
    torch.set_num_threads(1)  # the parent's thread pool didn't come along
    backend = "nccl" if opts.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=opts.procs)
    try:
        Runner(rank, opts, *data).run()
    finally:
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", required=True)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch", type=int, default=512, help="of all processes together")
    parser.add_argument("--lr", type=float, default=2e-3, help="for --batch")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=3)
    opts = parser.parse_args()
    os.makedirs(opts.out, exist_ok=True)

    train_x, train_y = read(opts.root, train=True)
    mean, std = statistics(train_x)
    train, test = TensorDataset(train_x, train_y), TensorDataset(*read(opts.root, train=False))
    # nothing above touches the GPU, so forking is safe
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            child,
            args=(os.path.join(folder, "rendezvous"), opts, train, test, mean, std),
            nprocs=opts.procs,
            start_method="fork",
        )


if __name__ == "__main__":
    main()
