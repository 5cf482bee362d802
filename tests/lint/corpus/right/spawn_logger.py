# expect: none
"""Bearing fault diagnosis from vibration windows, all GPUs of one machine, processes started with mp.spawn."""
import argparse
import csv
import os
import socket

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class VibrationWindows(Dataset):
    def __init__(self, npz, jitter=0.0):
        with np.load(npz) as f:
            self.signal, self.target = f["signal"].astype("float32"), f["target"].astype("int64")
        self.jitter = jitter

    def __len__(self):
        return self.target.shape[0]

    def __getitem__(self, k):
        sig = torch.from_numpy(self.signal[k])[None]
        if self.jitter:
            sig = sig * (1 + self.jitter * torch.randn(1)) + self.jitter * torch.randn_like(sig)
        return sig, self.target[k]


class Conv1dNet(nn.Module):
    def __init__(self, n_fault):
        super().__init__()
        def stage(i, o):
            return [nn.Conv1d(i, o, 7, stride=2, padding=3), nn.GroupNorm(8, o), nn.ReLU()]

        self.trunk = nn.Sequential(*stage(1, 32), *stage(32, 64), *stage(64, 128), nn.AdaptiveAvgPool1d(1))
        self.cls = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, n_fault))

    def forward(self, x):
        return self.cls(self.trunk(x))


class Meter:
    """Sums on the device; nothing is read back before result()."""

    def __init__(self, device, names):
        self.names = names
        self.sums = torch.zeros(len(names) + 1, device=device)

    def add(self, n, *values):
        for i, v in enumerate(values):
            self.sums[i] += v
        self.sums[-1] += n

    def result(self):
        total = self.sums.clone()
        dist.all_reduce(total)
        *sums, n = total.tolist()
        return {name: s / n for name, s in zip(self.names, sums)}


class Logger:
    """One line an epoch into a CSV file and onto the screen, from the first process only."""

    def __init__(self, folder, rank):
        self.active = rank == 0
        if self.active:
            os.makedirs(folder, exist_ok=True)
            self.file = open(os.path.join(folder, "log.csv"), "w", newline="")
            self.writer = csv.writer(self.file)

    def line(self, epoch, **values):
        if not self.active:
            return
        self.writer.writerow([epoch] + [f"{v:.6f}" for v in values.values()])
        self.file.flush()
        print(epoch, " ".join(f"{k}={v:.4f}" for k, v in values.items()))

    def close(self):
        if self.active:
            self.file.close()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_epoch(net, loader, criterion, device, optimizer=None):
    training = optimizer is not None
    net.train(training)
    meter = Meter(device, ["loss", "acc"])
    with torch.set_grad_enabled(training):
        for sig, target in loader:
            sig, target = sig.to(device, non_blocking=True), target.to(device, non_blocking=True)
            out = net(sig)
            loss = criterion(out, target)
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            meter.add(len(target), loss.detach() * len(target), (out.argmax(1) == target).sum())
    return meter.result()


def worker(gpu, n_gpus, port, opt):
    # one machine: the index of the process is that of its GPU
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", world_size=n_gpus, rank=gpu)
    device = torch.device("cuda", gpu)
    logger = Logger(opt.folder, gpu)

    train_set = VibrationWindows(opt.train, jitter=0.05)
    test_set = VibrationWindows(opt.test)
    sampler = DistributedSampler(train_set, n_gpus, gpu, shuffle=True, drop_last=True)
    n_workers = opt.workers // n_gpus
    train_loader = DataLoader(
        train_set, opt.batch // n_gpus, sampler=sampler, num_workers=n_workers, pin_memory=True, drop_last=True
    )
    test_loader = DataLoader(Subset(test_set, range(gpu, len(test_set), n_gpus)), 512, num_workers=n_workers)

    torch.manual_seed(opt.seed)
    net = DDP(Conv1dNet(opt.faults).to(device), device_ids=[gpu])
    torch.manual_seed(opt.seed + gpu + 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=opt.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [opt.epochs // 2, opt.epochs * 3 // 4])
    criterion = nn.CrossEntropyLoss()

    best = 0.0
    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        tr = run_epoch(net, train_loader, criterion, device, optimizer)
        scheduler.step()
        te = run_epoch(net.module, test_loader, criterion, device)
        logger.line(epoch, loss=tr["loss"], acc=tr["acc"], test_loss=te["loss"], test_acc=te["acc"])
        if te["acc"] > best:
            best = te["acc"]
            if gpu == 0:
                torch.save(net.module.state_dict(), os.path.join(opt.folder, "best.pth"))
    logger.close()
    dist.destroy_process_group()


def parse_options():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", required=True)
    ap.add_argument("--test", required=True)
    ap.add_argument("--folder", required=True)
    ap.add_argument("--faults", type=int, default=10)
    ap.add_argument("--epochs", type=int, default=80)
    ap.add_argument("--batch", type=int, default=1024, help="on all GPUs together")
    ap.add_argument("--lr", type=float, default=0.1, help="for this batch")
    ap.add_argument("--workers", type=int, default=16, help="of all processes together")
    ap.add_argument("--seed", type=int, default=0)
    return ap.parse_args()


if __name__ == "__main__":
    options = parse_options()
    gpus = torch.cuda.device_count()
    mp.spawn(worker, args=(gpus, free_port(), options), nprocs=gpus)
