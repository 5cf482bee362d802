# expect: collective-on-one-rank line 109 or 108 or 149 or 143 or 118 or 107
"""Base loop and image task split by inheritance; EMA, fp16, torch.compile, wandb.

torchrun --nproc_per_node=8 inherit_ema.py data=/data/in100 out=runs/a lr=0.05
"""
import copy
import functools
import os
import sys

import torch
import torch.distributed
import wandb
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, models, transforms

CONFIG = {
    "data": None, "out": None, "arch": "resnet50", "epochs": 100, "seed": 0,
    "batch": 64,        # for each process
    "workers": 6,       # for each process
    "lr": 0.05,         # for one process, multiplied by their number
    "ema": 0.9998, "clip": 2.0,
}


def main_only(method):
    @functools.wraps(method)
    def inner(self, *args, **kwargs):
        if self.rank == 0:
            return method(self, *args, **kwargs)
    return inner


class Ema:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for mine, theirs in zip(self.net.state_dict().values(), net.state_dict().values()):
            if mine.is_floating_point():
                mine.lerp_(theirs, 1 - self.decay)
            else:
                mine.copy_(theirs)


class Loop:
    """Epochs, checkpoints, reports. Subclasses supply `loaders`, `network` and `step_loss`."""

    def __init__(self, cfg, local_rank):
        self.cfg, self.device = cfg, torch.device("cuda", local_rank)
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.train_data, self.val_data = self.loaders()
        torch.manual_seed(cfg["seed"])
        self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.network()).to(self.device)
        self.ddp = DistributedDataParallel(self.net, device_ids=[local_rank])
        self.forward = torch.compile(self.ddp)
        self.ema = Ema(self.net, cfg["ema"])
        torch.manual_seed(cfg["seed"] + 1 + self.rank)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=cfg["lr"] * self.world, momentum=0.9,
                                         weight_decay=5e-5, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, cfg["epochs"] * len(self.train_data))
        self.scaler = torch.amp.GradScaler("cuda")
        self.path = os.path.join(cfg["out"], "last.pt")
        self.epoch, self.best = 0, 0.0

    def parts(self):
        return {"net": self.net, "ema": self.ema.net, "optimizer": self.optimizer,
                "scheduler": self.scheduler, "scaler": self.scaler}

    @main_only
    def save(self):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({**state, "epoch": self.epoch, "best": self.best}, self.path)

    def resume(self):
        if not os.path.exists(self.path):
            return
        state = torch.load(self.path, map_location=self.device, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.epoch, self.best = state["epoch"], state["best"]

    def train_epoch(self):
        self.train_data.sampler.set_epoch(self.epoch)
        self.ddp.train()
        loss_sum = torch.zeros((), device=self.device)
        for batch in self.train_data:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.step_loss(batch)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg["clip"])
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.ema.update(self.net)
            loss_sum += loss.detach()
        torch.distributed.all_reduce(loss_sum)
        return loss_sum.item() / (len(self.train_data) * self.world)

    @main_only
    def report(self, loss):
        top1 = self.validate()
        self.best = max(self.best, top1)
        wandb.log({"train/loss": loss, "val/top1": top1, "val/best": self.best}, step=self.epoch)

    def run(self):
        self.resume()
        while self.epoch < self.cfg["epochs"]:
            loss = self.train_epoch()
            self.epoch += 1
            self.report(loss)
            self.save()


class ImageTask(Loop):
    def loaders(self):
        norm = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        train = datasets.ImageFolder(os.path.join(self.cfg["data"], "train"), transforms.Compose(
            [transforms.RandomResizedCrop(192), transforms.RandomHorizontalFlip(), transforms.ToTensor(), norm]))
        val = datasets.ImageFolder(os.path.join(self.cfg["data"], "val"), transforms.Compose(
            [transforms.Resize(232), transforms.CenterCrop(224), transforms.ToTensor(), norm]))
        self.classes = len(train.classes)
        feed = functools.partial(DataLoader, batch_size=self.cfg["batch"], num_workers=self.cfg["workers"],
                                 pin_memory=True)
        return (feed(train, sampler=DistributedSampler(train, seed=self.cfg["seed"]), drop_last=True),
                feed(Subset(val, range(self.rank, len(val), self.world))))

    def network(self):
        return models.get_model(self.cfg["arch"], weights=None, num_classes=self.classes)

    def step_loss(self, batch):
        x, y = (t.to(self.device, non_blocking=True) for t in batch)
        return nn.functional.cross_entropy(self.forward(x), y, label_smoothing=0.1)

    @torch.no_grad()
    def validate(self):
        tally = torch.zeros(2, device=self.device)
        for x, y in self.val_data:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            tally[0] += (self.ema.net(x).argmax(1) == y).sum()
            tally[1] += len(y)
        torch.distributed.all_reduce(tally)
        return (tally[0] / tally[1]).item()


def main():
    cfg = dict(CONFIG)
    for item in sys.argv[1:]:
        key, value = item.split("=", 1)
        cfg[key] = type(CONFIG[key])(value) if CONFIG[key] is not None else value
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl")
    if torch.distributed.get_rank() == 0:
        os.makedirs(cfg["out"], exist_ok=True)
        wandb.init(project="in100", config=cfg)
    ImageTask(cfg, local_rank).run()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
