# expect: saved-every-rank line 90 or 86 or 91 or 125
# srun --ntasks-per-node=4 --gpus-per-node=4 python slurm_trainer.py --imagenet $SCRATCH/imagenet --workdir $SCRATCH/run1
from __future__ import annotations

import argparse
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from torchvision import models
from torchvision import transforms as tf
from torchvision.datasets import ImageFolder


@dataclass
class Env:
    rank: int
    local: int
    world: int

    @classmethod
    def from_slurm(cls):
        e = os.environ
        e.setdefault("MASTER_ADDR", e["SLURM_LAUNCH_NODE_IPADDR"])
        e["MASTER_PORT"] = str(15000 + int(e["SLURM_JOB_ID"]) % 20000)
        return cls(int(e["SLURM_PROCID"]), int(e["SLURM_LOCALID"]), int(e["SLURM_NTASKS"]))


class Trainer:
    def __init__(self, args, env: Env):
        self.args, self.env = args, env
        self.device = torch.device("cuda", env.local)
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", rank=env.rank, world_size=env.world)
        for seeder in (torch.manual_seed, np.random.seed, random.seed):
            seeder(args.seed + env.rank)
        self.start = 0
        self.best = 0.0
        self._data()
        self._model()
        self.writer = SummaryWriter(args.workdir / "tb") if env.rank == 0 else None

    def _data(self):
        a, env = self.args, self.env
        norm = tf.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        train = ImageFolder(a.imagenet / "train", tf.Compose(
            [tf.RandomResizedCrop(224), tf.RandomHorizontalFlip(), tf.ToTensor(), norm]))
        val = ImageFolder(a.imagenet / "val", tf.Compose(
            [tf.Resize(256), tf.CenterCrop(224), tf.ToTensor(), norm]))
        self.train_sampler = DistributedSampler(train, env.world, env.rank, seed=a.seed)
        common = dict(batch_size=a.batch_per_gpu, num_workers=a.workers, pin_memory=True, persistent_workers=True)
        self.train_dl = DataLoader(train, sampler=self.train_sampler, drop_last=True, **common)
        self.val_dl = DataLoader(Subset(val, range(env.rank, len(val), env.world)), **common)

    def _model(self):
        a, env = self.args, self.env
        core = nn.SyncBatchNorm.convert_sync_batchnorm(models.resnet50()).to(self.device)
        self.core = core
        self.net = nn.parallel.DistributedDataParallel(core, device_ids=[env.local])
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        rate = 0.1 * a.batch_per_gpu * env.world / 256
        self.opt = torch.optim.SGD(core.parameters(), rate, momentum=0.9, weight_decay=5e-5)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.opt, [30, 60, 80])

    @property
    def latest(self) -> Path:
        return self.args.workdir / "latest.pt"

    def resume(self):
        if not self.latest.exists():
            return
        ck = torch.load(self.latest, map_location=self.device, weights_only=True)
        self.core.load_state_dict(ck["net"])
        self.opt.load_state_dict(ck["opt"])
        self.sched.load_state_dict(ck["sched"])
        self.start, self.best = ck["epoch"] + 1, ck["best"]

    def snapshot(self, epoch):
        state = {"net": self.core.state_dict(), "opt": self.opt.state_dict(),
                 "sched": self.sched.state_dict(), "epoch": epoch, "best": self.best}
        partial = self.latest.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self.latest)

    def one_epoch(self, epoch):
        self.train_sampler.set_epoch(epoch)
        self.net.train()
        total = torch.zeros(2, device=self.device)
        for x, y in self.train_dl:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            loss = self.loss(self.net(x), y)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            total += torch.stack([loss.detach(), torch.ones_like(loss)])
        self.sched.step()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    @torch.no_grad()
    def validate(self):
        self.core.eval()
        counts = torch.zeros(3, device=self.device)
        for x, y in self.val_dl:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            top = self.core(x).topk(5, dim=1).indices == y[:, None]
            counts += torch.stack([top[:, 0].sum(), top.sum(), torch.tensor(len(y), device=self.device)])
        dist.all_reduce(counts)
        return (counts[:2] / counts[2]).tolist()

    def fit(self):
        self.resume()
        for epoch in range(self.start, self.args.epochs):
            loss = self.one_epoch(epoch)
            top1, top5 = self.validate()
            self.best = max(self.best, top1)
            self.snapshot(epoch)
            if self.writer is not None:
                for tag, value in {"train/loss": loss, "val/top1": top1, "val/top5": top5}.items():
                    self.writer.add_scalar(tag, value, epoch)
        if self.writer is not None:
            self.writer.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--imagenet", type=Path, required=True)
    ap.add_argument("--workdir", type=Path, required=True, help="one per run")
    ap.add_argument("--batch-per-gpu", type=int, default=128)
    ap.add_argument("--workers", type=int, default=6, help="of each process")
    ap.add_argument("--epochs", type=int, default=90)
    ap.add_argument("--seed", type=int, default=2024)
    cli = ap.parse_args()
    cli.workdir.mkdir(parents=True, exist_ok=True)
    Trainer(cli, Env.from_slurm()).fit()
