# expect: worker-seeds-equal line 68 or 67 or 69 or 71
"""Mixup + EMA training configured by one dictionary (and key=value pairs on the command line)."""
import ast
import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import datasets, models, transforms

CONFIG = dict(
    data=dict(root="data/tiny-imagenet", workers_per_node=16, classes=200),
    optim=dict(global_batch=512, lr=0.4, weight_decay=5e-5, epochs=120),  # lr belongs to global_batch
    mixup=dict(alpha=0.2),
    ema=dict(decay=0.9998),
    run=dict(seed=31, folder="runs/mixup"),
)


def override(cfg, pairs):
    for pair in pairs:
        key, value = pair.split("=", 1)
        *sections, last = key.split(".")
        node = cfg
        for s in sections:
            node = node[s]
        node[last] = ast.literal_eval(value) if not isinstance(node[last], str) else value
    return cfg


class Cutout(Dataset):
    """Erases a random square; numpy's generator, which torch seeds apart in each worker."""

    def __init__(self, base, side=16):
        self.base, self.side = base, side

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        image, label = self.base[index]
        top, left = np.random.randint(0, image.shape[-1] - self.side, size=2)
        image[:, top:top + self.side, left:left + self.side] = 0
        return image, label


def seed_worker(worker_id):
    base = torch.initial_seed() % 2 ** 32
    np.random.seed(base)
    random.seed(base)


def loaders(cfg, rank, world, local_world):
    d = cfg["data"]
    norm = transforms.Normalize((0.480, 0.448, 0.398), (0.277, 0.269, 0.282))
    train = datasets.ImageFolder(os.path.join(d["root"], "train"), transforms.Compose(
        [transforms.RandomCrop(64, 8), transforms.RandomHorizontalFlip(), transforms.ToTensor(), norm]))
    valid = datasets.ImageFolder(os.path.join(d["root"], "val"), transforms.Compose([transforms.ToTensor(), norm]))
    train = Cutout(train)
    batch = cfg["optim"]["global_batch"] // world
    workers = d["workers_per_node"] // local_world
    generator = torch.Generator()
    generator.manual_seed(cfg["run"]["seed"])
    train_loader = DataLoader(train, batch_size=batch, sampler=DistributedSampler(train, seed=cfg["run"]["seed"]),
                              num_workers=workers, pin_memory=True, drop_last=True,
                              worker_init_fn=seed_worker, generator=generator)
    valid_loader = DataLoader(Subset(valid, range(rank, len(valid), world)), batch_size=batch, num_workers=workers)
    return train_loader, valid_loader


def mixup_batch(x, y, alpha, classes, rng):
    lam = rng.beta(alpha, alpha)
    target = nn.functional.one_hot(y, classes).float()
    other = torch.randperm(x.shape[0], device=x.device)
    return lam * x + (1 - lam) * x[other], lam * target + (1 - lam) * target[other]


def test(net, loader, device):
    net.eval()
    tally = torch.zeros(2, device=device, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            tally[0] += net(x).argmax(1).eq(y).sum()
            tally[1] += len(y)
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()


def main():
    cfg = override(CONFIG, sys.argv[1:])
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed = cfg["run"]["seed"]
    torch.manual_seed(seed + rank)
    rng = np.random.default_rng([seed, rank])

    train_loader, valid_loader = loaders(cfg, rank, world, int(os.environ["LOCAL_WORLD_SIZE"]))
    net = models.resnet18(num_classes=cfg["data"]["classes"])
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    ddp = nn.parallel.DistributedDataParallel(net, device_ids=[local])
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(cfg["ema"]["decay"]), use_buffers=True)
    o = cfg["optim"]
    opt = torch.optim.SGD(ddp.parameters(), lr=o["lr"], momentum=0.9, weight_decay=o["weight_decay"], nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=o["epochs"])

    for epoch in range(o["epochs"]):
        train_loader.sampler.set_epoch(epoch)
        ddp.train()
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            x, y = mixup_batch(x, y, cfg["mixup"]["alpha"], cfg["data"]["classes"], rng)
            loss = nn.functional.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update_parameters(net)
        sched.step()
        raw_acc, ema_acc = test(net, valid_loader, device), test(ema, valid_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: valid {raw_acc:.4f}, ema {ema_acc:.4f}")
    if rank == 0:
        os.makedirs(cfg["run"]["folder"], exist_ok=True)
        torch.save({"net": net.state_dict(), "ema": ema.module.state_dict()},
                   os.path.join(cfg["run"]["folder"], "final.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
