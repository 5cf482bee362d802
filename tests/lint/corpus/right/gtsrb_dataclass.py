# expect: none
"""Traffic signs.  torchrun --standalone --nproc_per_node=gpu gtsrb_dataclass.py key=value ..."""
import os
import sys
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


@dataclass
class Config:
    root: str = "gtsrb"
    epochs: int = 30
    batch: int = 256          # over all processes
    lr: float = 0.05          # for that batch
    milestones: int = 10      # epochs between two cuts of the rate
    check_every: int = 200    # steps between two looks at the validation set
    workers: int = 4          # per process
    seed: int = 55
    snapshot: str = "gtsrb.snap"

    @classmethod
    def from_cli(cls, words):
        kinds = {f.name: f.type for f in fields(cls)}
        pairs = (w.split("=", 1) for w in words)
        return cls(**{k: {"int": int, "float": float}.get(getattr(kinds[k], "__name__", kinds[k]), str)(v)
                      for k, v in pairs})


class SignNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 64, 128, 256]
        layers = []
        for a, b in zip(widths, widths[1:]):
            layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
        self.trunk = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(256 * 36, 43))

    def forward(self, x):
        return self.trunk(x)


class Base:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        torch.manual_seed(cfg.seed + self.rank)
        self.epoch = 0
        self.prepare_data()
        self.prepare_model()
        self.load()

    def fetch(self):
        if self.device.index == 0:
            for part in ("train", "test"):
                datasets.GTSRB(self.cfg.root, split=part, download=True)
        dist.barrier()

    def prepare_data(self):
        self.fetch()
        fixed = [transforms.Resize((48, 48)), transforms.ToTensor(), transforms.Normalize((0.34, 0.31, 0.32), (0.17, 0.16, 0.17))]
        moved = [transforms.RandomRotation(10), transforms.ColorJitter(0.4, 0.4)]
        train = datasets.GTSRB(self.cfg.root, split="train", transform=transforms.Compose(moved + fixed))
        valid = datasets.GTSRB(self.cfg.root, split="test", transform=transforms.Compose(fixed))
        share = self.cfg.batch // self.world
        self.sampler = DistributedSampler(train, seed=self.cfg.seed)
        self.train_dl = DataLoader(train, share, sampler=self.sampler, num_workers=self.cfg.workers, drop_last=True)
        self.valid_dl = DataLoader(Subset(valid, range(self.rank, len(valid), self.world)), 512,
                                   num_workers=self.cfg.workers)

    def prepare_model(self):
        self.net = SignNet().to(self.device)
        self.ddp = DistributedDataParallel(self.net, device_ids=[self.device.index])
        self.opt = optim.SGD(self.ddp.parameters(), lr=self.cfg.lr, momentum=0.9, nesterov=True)
        self.sched = optim.lr_scheduler.StepLR(self.opt, step_size=self.cfg.milestones, gamma=0.1)

    def load(self):
        if not os.path.exists(self.cfg.snapshot):
            return
        snap = torch.load(self.cfg.snapshot, map_location=self.device, weights_only=True)
        for part in ("net", "opt", "sched"):
            getattr(self, part).load_state_dict(snap[part])
        self.epoch = snap["epoch"]

    def store(self):
        if self.rank == 0:
            snap = {part: getattr(self, part).state_dict() for part in ("net", "opt", "sched")}
            snap["epoch"] = self.epoch
            torch.save(snap, self.cfg.snapshot)


class Trainer(Base):
    loss = staticmethod(nn.functional.cross_entropy)

    def check(self):
        self.net.eval()
        acc = torch.zeros(3, device=self.device)
        with torch.no_grad():
            for x, y in self.valid_dl:
                x, y = x.to(self.device), y.to(self.device)
                z = self.net(x)
                acc[0] += self.loss(z, y, reduction="sum")
                acc[1] += (z.argmax(1) == y).sum()
                acc[2] += len(y)
        self.net.train()
        dist.all_reduce(acc)
        loss, right, n = acc.tolist()
        return loss / n, right / n

    def run(self):
        self.ddp.train()
        while self.epoch < self.cfg.epochs:
            self.sampler.set_epoch(self.epoch)
            for i, (x, y) in enumerate(self.train_dl, start=1):
                self.opt.zero_grad()
                self.loss(self.ddp(x.to(self.device)), y.to(self.device)).backward()
                self.opt.step()
                if i % self.cfg.check_every == 0 or i == len(self.train_dl):
                    self.report(i, *self.check())
            self.sched.step()
            self.epoch += 1
            self.store()

    def report(self, step, loss, accuracy):
        if self.rank == 0:
            print(f"[{self.epoch}:{step}] valid loss {loss:.4f} accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    Trainer(Config.from_cli(sys.argv[1:])).run()
    dist.destroy_process_group()
