# expect: sampler-other-dataset line 142 or 144 or 145 or 147
"""Surface defects are rare: train with class-balanced sampling over all ranks."""
import os
import json
import random
import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler, Subset


class DistributedWeightedSampler(Sampler):
    """
    All ranks draw the same indices, with replacement and by weight, and each keeps every n-th of them.
    """

    def __init__(self, weights, nb_samples, nb_replicas=None, rank=None, seed=0):
        self.weights = torch.as_tensor(weights, dtype=torch.double)
        self.nb_replicas = nb_replicas if nb_replicas is not None else dist.get_world_size()
        self.rank = rank if rank is not None else dist.get_rank()
        self.per_replica = nb_samples // self.nb_replicas
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.per_replica

    def __iter__(self):
        gen = torch.Generator()
        gen.manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.per_replica * self.nb_replicas, replacement=True, generator=gen)
        return iter(drawn[self.rank :: self.nb_replicas].tolist())


class EvalSampler(Sampler):
    """Every index once, over all ranks."""

    def __init__(self, length, rank, nb_replicas):
        self.indices = range(rank, length, nb_replicas)

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        return iter(self.indices)


class SurfaceDataset(Dataset):
    def __init__(self, folder):
        self.images = np.load(os.path.join(folder, "images.npy"), mmap_mode="r")
        self.classes = np.load(os.path.join(folder, "classes.npy")).astype(np.int64)

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, idx):
        img = torch.from_numpy(self.images[idx].astype(np.float32) / 255.0 - 0.5)
        return img.unsqueeze(0), int(self.classes[idx])


class Augmented(Dataset):
    def __init__(self, base):
        self.base = base

    def __len__(self):
        return len(self.base)

    def __getitem__(self, idx):
        img, cls = self.base[idx]
        if torch.rand(()) < 0.5:
            img = img.flip(-1)
        img = img + 0.02 * torch.randn_like(img)
        return img, cls


def get_subsets(dataset, frac, seed):
    # same seed, hence same split, on each rank
    perm = np.random.RandomState(seed).permutation(len(dataset))
    nb_val = int(frac * len(dataset))
    return Subset(dataset, perm[nb_val:].tolist()), Subset(dataset, perm[:nb_val].tolist())


def get_weights(classes):
    counts = np.bincount(classes)
    return 1.0 / counts[classes]


def get_network(nb_classes):
    layers, c_in = [], 1
    for c_out in (32, 64, 128, 256):
        layers += [nn.Conv2d(c_in, c_out, 3, stride=2, padding=1), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)]
        c_in = c_out
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, nb_classes))
    return nn.SyncBatchNorm.convert_sync_batchnorm(net)


def evaluate(net, loader, nb_classes, device):
    """Recall averaged over classes, from the confusion matrix of all ranks."""
    net.eval()
    conf = torch.zeros(nb_classes, nb_classes, dtype=torch.long, device=device)
    with torch.no_grad():
        for img, cls in loader:
            img, cls = img.to(device), cls.to(device)
            pred = net(img).argmax(1)
            conf += torch.bincount(cls * nb_classes + pred, minlength=nb_classes**2).view(nb_classes, nb_classes)
    dist.all_reduce(conf)
    recall = conf.diag() / conf.sum(1).clamp(min=1)
    return recall.mean().item()


def save_ckpt(cfg, name, net, optimizer, scheduler, epoch, best):
    if dist.get_rank() != 0:
        return
    torch.save(
        {
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
            "best": best,
        },
        os.path.join(cfg["out"], name),
    )


def main(cfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group(backend="nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    full = SurfaceDataset(cfg["data"])
    train_sub, val_sub = get_subsets(full, cfg["val_frac"], cfg["seed"])
    sampler = DistributedWeightedSampler(get_weights(full.classes), len(train_sub), seed=cfg["seed"])
    per_gpu = cfg["batch_all_gpus"] // world
    train_loader = DataLoader(
        Augmented(train_sub),
        batch_size=per_gpu,
        sampler=sampler,
        num_workers=cfg["workers_per_gpu"],
        drop_last=True,
    )
    val_loader = DataLoader(val_sub, batch_size=256, sampler=EvalSampler(len(val_sub), rank, world))

    torch.manual_seed(cfg["seed"])
    net = get_network(cfg["nb_classes"]).to(device)
    wrapped = DistributedDataParallel(net, device_ids=[local_rank])
    torch.manual_seed(cfg["seed"] + 31 * (rank + 1))
    random.seed(cfg["seed"] + 31 * (rank + 1))

    # cfg["lr"] goes with batch_all_gpus
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=cfg["lr"], momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=cfg["decay_epochs"], gamma=0.1)
    start, best = 0, 0.0
    if cfg.get("resume"):
        ckpt = torch.load(cfg["resume"], map_location=device, weights_only=True)
        net.load_state_dict(ckpt["net"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        start, best = ckpt["epoch"] + 1, ckpt["best"]

    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)
    for epoch in range(start, cfg["epochs"]):
        sampler.set_epoch(epoch)
        wrapped.train()
        loss_acc = torch.zeros(2, device=device)
        for img, cls in train_loader:
            img, cls = img.to(device), cls.to(device)
            loss = loss_fn(wrapped(img), cls)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_acc += torch.stack([loss.detach() * len(cls), loss.new_tensor(len(cls))])
        scheduler.step()
        dist.all_reduce(loss_acc)
        score = evaluate(net, val_loader, cfg["nb_classes"], device)
        if rank == 0:
            print(json.dumps({"epoch": epoch, "loss": (loss_acc[0] / loss_acc[1]).item(), "recall": score}))
        is_best, best = score > best, max(score, best)
        save_ckpt(cfg, "last.pth", net, optimizer, scheduler, epoch, best)
        if is_best:
            save_ckpt(cfg, "best.pth", net, optimizer, scheduler, epoch, best)

    dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("config", help="json with data, out, nb_classes, batch_all_gpus, lr, epochs and so on")
    with open(cli.parse_args().config) as f:
        main(json.load(f))
