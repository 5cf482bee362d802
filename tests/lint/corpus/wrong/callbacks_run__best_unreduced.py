# expect: best-unreduced line 48 or 101 or 49 or 51
"""A small trainer with callbacks, started by torchrun."""
import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, models, transforms as T


class Callback:
    def on_epoch_begin(self, run): ...
    def on_epoch_end(self, run, logs): ...
    def on_end(self, run): ...


class ShuffleCallback(Callback):
    def on_epoch_begin(self, run):
        run.loader.sampler.set_epoch(run.epoch)


class BoardCallback(Callback):
    def __init__(self, folder, rank):
        self.writer = SummaryWriter(folder) if rank == 0 else None

    def on_epoch_end(self, run, logs):
        if self.writer is not None:
            for name, value in logs.items():
                self.writer.add_scalar(name, value, run.epoch)

    def on_end(self, run):
        if self.writer is not None:
            self.writer.close()


class BestCallback(Callback):
    def __init__(self, folder, rank):
        self.path, self.rank = Path(folder) / "best.pt", rank
        self.best = float("-inf")

    def on_epoch_end(self, run, logs):
        value = run.accuracy
        if value <= self.best:
            return
        self.best = value
        if self.rank == 0:
            torch.save(run.model.module.state_dict(), self.path)


@dataclass
class Run:
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    val_loader: DataLoader
    device: torch.device
    callbacks: list = field(default_factory=list)
    epoch: int = 0
    accuracy: float = 0.0

    def _tell(self, what, *args):
        for callback in self.callbacks:
            getattr(callback, what)(self, *args)

    def _train(self):
        self.model.train()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for x, y in self.loader:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            sums[0] += loss.detach() * y.shape[0]
            sums[1] += y.shape[0]
        return sums

    @torch.no_grad()
    def _validate(self):
        module = self.model.module
        module.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for x, y in self.val_loader:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            out = module(x)
            sums[0] += F.cross_entropy(out, y, reduction="sum")
            sums[1] += (out.argmax(dim=1) == y).sum()
            sums[2] += y.shape[0]
        return sums

    def fit(self, epochs):
        for self.epoch in range(epochs):
            self._tell("on_epoch_begin")
            train, val = self._train(), self._validate()
            self.accuracy = (val[1] / val[2]).item()
            dist.all_reduce(train)
            dist.all_reduce(val)
            logs = {
                "train/loss": (train[0] / train[1]).item(),
                "val/loss": (val[0] / val[2]).item(),
                "val/accuracy": (val[1] / val[2]).item(),
            }
            self._tell("on_epoch_end", logs)
        self._tell("on_end")


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("data", type=Path, help="folder with train/ and val/")
    p.add_argument("out", type=Path)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--batch", type=int, default=32, help="images per GPU")
    p.add_argument("--lr", type=float, default=1e-4, help="for one GPU; multiplied by their number")
    p.add_argument("--workers", type=int, default=4, help="per GPU")
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def main():
    args = arguments()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", gpu)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
    dist.barrier()

    to_input = T.Compose([T.ToTensor(), T.Normalize([0.5] * 3, [0.25] * 3)])
    train_set = datasets.ImageFolder(args.data / "train", T.Compose([T.RandomResizedCrop(192), to_input]))
    val_set = datasets.ImageFolder(args.data / "val", T.Compose([T.Resize(208), T.CenterCrop(192), to_input]))
    val_part = Subset(val_set, list(range(rank, len(val_set), world)))
    loader = DataLoader(train_set, args.batch, sampler=DistributedSampler(train_set, seed=args.seed),
                        num_workers=args.workers, pin_memory=True, drop_last=True)
    val_loader = DataLoader(val_part, args.batch * 2, num_workers=args.workers, pin_memory=True)

    torch.manual_seed(args.seed)
    net = models.swin_t(weights=None, num_classes=len(train_set.classes)).to(device)
    model = DistributedDataParallel(net, device_ids=[gpu])
    torch.manual_seed(args.seed + 1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * world)

    callbacks = [ShuffleCallback(), BoardCallback(args.out / "tb", rank), BestCallback(args.out, rank)]
    Run(model, optimizer, loader, val_loader, device, callbacks).fit(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
