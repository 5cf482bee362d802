# expect: barrier-each-step line 131 or 49
"""Chest X-ray classification (normal / bacterial / viral), DenseNet-121.

Submit with one task per GPU:  srun python slurm_cxr_yaml.py config.yaml
The YAML file holds: root, run_dir, epochs, global_batch, lr, weight_decay, workers_per_node, seed
"""
import os
import subprocess
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import ImageFolder


def slurm_env():
    """What Slurm says about this task."""
    env = os.environ
    return SimpleNamespace(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env["SLURM_LOCALID"]),
        world=int(env["SLURM_NTASKS"]),
        tasks_on_node=int(env["SLURM_NTASKS"]) // int(env["SLURM_NNODES"]),
        nodelist=env["SLURM_JOB_NODELIST"],
        job_id=int(env["SLURM_JOB_ID"]),
    )


def init_distributed(task):
    hosts = subprocess.check_output(["scontrol", "show", "hostnames", task.nodelist], text=True).split()
    port = 12000 + task.job_id % 20000  # every job has its own
    torch.cuda.set_device(task.local_rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://{hosts[0]}:{port}", rank=task.rank, world_size=task.world
    )
    return torch.device("cuda", task.local_rank)


def keep_in_step():
    # the nodes' file systems aren't equally fast
    if dist.is_initialized():
        dist.barrier()


def make_transforms(train):
    tail = [transforms.Grayscale(3), transforms.ToTensor(), transforms.Normalize([0.482] * 3, [0.236] * 3)]
    if train:
        head = [transforms.RandomResizedCrop(224, scale=(0.7, 1.0)), transforms.RandomRotation(7)]
    else:
        head = [transforms.Resize(256), transforms.CenterCrop(224)]
    return transforms.Compose(head + tail)


def make_loaders(cfg, task):
    batch = cfg["global_batch"] // task.world
    workers = max(1, cfg["workers_per_node"] // task.tasks_on_node)
    train_set = ImageFolder(os.path.join(cfg["root"], "train"), make_transforms(True))
    val_set = ImageFolder(os.path.join(cfg["root"], "val"), make_transforms(False))
    sampler = DistributedSampler(train_set, shuffle=True, seed=cfg["seed"], drop_last=True)
    train = DataLoader(
        train_set, batch_size=batch, sampler=sampler, num_workers=workers, pin_memory=True, drop_last=True
    )
    my_share = range(task.rank, len(val_set), task.world)
    val = DataLoader(Subset(val_set, my_share), batch_size=batch, num_workers=workers, pin_memory=True)
    return train, val, len(train_set.classes)


def confusion(net, loader, n_classes, device):
    """Confusion matrix over the whole validation set (rows: truth)."""
    matrix = torch.zeros(n_classes * n_classes, dtype=torch.long, device=device)
    net.eval()
    with torch.inference_mode():
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                pred = net(x).argmax(1)
            matrix += torch.bincount(y * n_classes + pred, minlength=n_classes * n_classes)
    dist.all_reduce(matrix)
    return matrix.view(n_classes, n_classes).double()


def main():
    with open(sys.argv[1]) as f:
        cfg = yaml.safe_load(f)
    task = slurm_env()
    device = init_distributed(task)
    torch.manual_seed(cfg["seed"] + task.rank)

    train_loader, val_loader, n_classes = make_loaders(cfg, task)

    net = models.densenet121(weights=None, num_classes=n_classes, drop_rate=0.2)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net.to(device)
    ddp_net = DDP(net, device_ids=[task.local_rank], output_device=task.local_rank)

    optimizer = torch.optim.AdamW(ddp_net.parameters(), lr=cfg["lr"], weight_decay=cfg["weight_decay"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cfg["epochs"])
    criterion = nn.CrossEntropyLoss().to(device)

    os.makedirs(cfg["run_dir"], exist_ok=True)
    ckpt_file = os.path.join(cfg["run_dir"], f"{task.job_id}.pt")
    first_epoch, best = 0, 0.0
    if os.path.isfile(ckpt_file):  # requeued after preemption: the job keeps its id
        saved = torch.load(ckpt_file, map_location="cpu", weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first_epoch, best = saved["next_epoch"], saved["best"]
    dist.barrier()  # nobody writes before all have looked

    for epoch in range(first_epoch, cfg["epochs"]):
        train_loader.sampler.set_epoch(epoch)
        ddp_net.train()
        running = torch.zeros((), device=device)
        for x, y in train_loader:
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(ddp_net(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            running += loss.detach()
            keep_in_step()
        scheduler.step()
        dist.all_reduce(running)  # equally many batches of one size on all ranks
        train_loss = running.item() / (len(train_loader) * task.world)

        matrix = confusion(net, val_loader, n_classes, device)
        recall = (matrix.diag() / matrix.sum(1).clamp(min=1)).mean().item()
        if task.rank == 0:
            print(f"{epoch:03d} loss {train_loss:.4f} balanced accuracy {recall:.4f}", flush=True)
            if recall > best:
                torch.save(net.state_dict(), os.path.join(cfg["run_dir"], f"{task.job_id}_best.pt"))
            torch.save(
                {
                    "net": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "next_epoch": epoch + 1,
                    "best": max(best, recall),
                },
                ckpt_file,
            )
        best = max(best, recall)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
