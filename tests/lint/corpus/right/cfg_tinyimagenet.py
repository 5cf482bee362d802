# expect: none
"""Tiny ImageNet; everything that can be chosen is in CONFIG, `key=value` on the command line overrides.

torchrun --nproc_per_node=4 cfg_tinyimagenet.py data.root=/data/tiny optim.lr=0.2
"""
import ast
import copy
import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data as tud
from torch import nn
from torchvision import datasets, models
from torchvision import transforms as tf

CONFIG = {
    "seed": 1999,
    "out": None,
    "data": {"root": None, "batch_per_gpu": 128, "workers_per_gpu": 6},
    "model": {"name": "convnext_tiny", "kwargs": {"num_classes": 200, "stochastic_depth_prob": 0.1}},
    "optim": {"name": "AdamW", "lr": 2e-4, "kwargs": {"weight_decay": 0.05}},   # lr of one GPU
    "sched": {"name": "CosineAnnealingLR", "kwargs": {"T_max": 80}},             # in epochs
    "epochs": 80,
}


def read_config(argv):
    cfg = copy.deepcopy(CONFIG)
    for item in argv:
        key, value = item.split("=", 1)
        *parents, leaf = key.split(".")
        node = cfg
        for name in parents:
            node = node[name]
        if leaf not in node:
            raise KeyError(key)
        try:
            node[leaf] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            node[leaf] = value
    return cfg


def pixel_noise(img):
    """Salt and pepper, drawn with numpy."""
    grid = np.array(img)
    mask = np.random.random(grid.shape[:2])
    grid[mask < 0.01] = 0
    grid[mask > 0.99] = 255
    return grid


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def get_loaders(cfg, rank, world):
    d = cfg["data"]
    norm = tf.Normalize([0.480, 0.448, 0.398], [0.277, 0.269, 0.282])
    train_ds = datasets.ImageFolder(os.path.join(d["root"], "train"), tf.Compose(
        [tf.RandomCrop(64, padding=8), tf.RandomHorizontalFlip(), tf.Lambda(pixel_noise), tf.ToTensor(), norm]))
    valid_ds = datasets.ImageFolder(os.path.join(d["root"], "val"), tf.Compose([tf.ToTensor(), norm]))
    valid_ds = tud.Subset(valid_ds, range(rank, len(valid_ds), world))
    samplers = {"train": tud.DistributedSampler(train_ds, world, rank, shuffle=True, seed=cfg["seed"]),
                "valid": tud.SequentialSampler(valid_ds)}
    common = {"batch_size": d["batch_per_gpu"], "num_workers": d["workers_per_gpu"], "pin_memory": True,
              "worker_init_fn": seed_worker}
    return {
        "train": tud.DataLoader(train_ds, sampler=samplers["train"], drop_last=True, **common),
        "valid": tud.DataLoader(valid_ds, sampler=samplers["valid"], **common),
    }


def build(cfg, world):
    net = getattr(models, cfg["model"]["name"])(**cfg["model"]["kwargs"])
    make_opt = getattr(torch.optim, cfg["optim"]["name"])
    make_sched = getattr(torch.optim.lr_scheduler, cfg["sched"]["name"])

    def optimizers(params):
        opt = make_opt(params, lr=cfg["optim"]["lr"] * world, **cfg["optim"]["kwargs"])
        return opt, make_sched(opt, **cfg["sched"]["kwargs"])

    return net, optimizers


def run_phase(phase, model, loader, device, opt=None):
    training = phase == "train"
    model.train(training)
    acc = torch.zeros(3, device=device)
    with torch.set_grad_enabled(training):
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            if training:
                opt.zero_grad(set_to_none=True)
                loss.backward()
                opt.step()
            acc[0] += loss.detach() * len(y)
            acc[1] += (logits.argmax(1) == y).sum()
            acc[2] += len(y)
    dist.all_reduce(acc)
    loss, right, n = acc.tolist()
    return loss / n, right / n


def main():
    cfg = read_config(sys.argv[1:])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(cfg["seed"] + rank)

    loaders = get_loaders(cfg, rank, world)
    net, optimizers = build(cfg, world)
    net.to(device)
    ddp = nn.parallel.DistributedDataParallel(net, device_ids=[local_rank])
    opt, sched = optimizers(ddp.parameters())

    for epoch in range(cfg["epochs"]):
        loaders["train"].sampler.set_epoch(epoch)
        t_loss, t_acc = run_phase("train", ddp, loaders["train"], device, opt)
        sched.step()
        v_loss, v_acc = run_phase("valid", net, loaders["valid"], device)
        if rank == 0:
            print(f"{epoch:02d} train {t_loss:.3f}/{t_acc:.3f} valid {v_loss:.3f}/{v_acc:.3f}")
    if rank == 0 and cfg["out"]:
        torch.save({"config": cfg, "net": net.state_dict()}, cfg["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
