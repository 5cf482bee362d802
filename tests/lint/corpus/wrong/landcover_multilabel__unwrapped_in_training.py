# expect: unwrapped-in-training line 122 or 121 or 153
"""Multi-label land cover of 13-band satellite patches, in bfloat16 with channels_last and torch.compile."""
import argparse
import math
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.models import resnet50

N_BANDS, N_LABELS = 13, 19


class PatchDataset(Dataset):
    """patches.npy (N, 13, 120, 120) uint16, labels.npy (N, 19), band statistics in stats.npz."""

    def __init__(self, folder):
        self.patches = np.load(Path(folder) / "patches.npy", mmap_mode="r")
        self.labels = np.load(Path(folder) / "labels.npy").astype(np.float32)
        with np.load(Path(folder) / "stats.npz") as stats:
            self.mean = stats["mean"].astype(np.float32).reshape(-1, 1, 1)
            self.std = stats["std"].astype(np.float32).reshape(-1, 1, 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        x = (self.patches[i].astype(np.float32) - self.mean) / self.std
        return torch.from_numpy(x), torch.from_numpy(self.labels[i]), i


def split(dataset, val_fraction, label_fraction, seed):
    """Same split on all ranks: the generator is seeded with the run's seed. Of the training part, a random share."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(dataset), generator=g).tolist()
    n_val = int(val_fraction * len(order))
    val, train = order[:n_val], order[n_val:]
    keep = torch.randperm(len(train), generator=g)[: int(label_fraction * len(train))].tolist()
    return Subset(dataset, [train[i] for i in keep]), val


def make_model():
    model = resnet50(weights=None, num_classes=N_LABELS)
    model.conv1 = nn.Conv2d(N_BANDS, 64, kernel_size=7, stride=2, padding=3, bias=False)
    model.fc = nn.Sequential(nn.Dropout(0.3), nn.Linear(2048, N_LABELS))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def augment(x):
    """Flips and quarter turns for the batch as a whole, drawn on the host."""
    k, flip = random.randrange(4), random.random() < 0.5
    x = torch.rot90(x, k, dims=(2, 3))
    x = x.flip(3) if flip else x
    return x.contiguous(memory_format=torch.channels_last)


def average_precision(scores, targets):
    order = scores.argsort(dim=0, descending=True)
    hits = targets.gather(0, order)
    ranks = torch.arange(1, len(scores) + 1, device=scores.device).unsqueeze(1)
    precision = hits.cumsum(0) / ranks
    return (precision * hits).sum(0) / hits.sum(0).clamp(min=1)


@torch.no_grad()
def evaluate(model, loader, n_total, device):
    """Mean average precision. It can't be averaged over ranks, so the scores of all of them are put together."""
    model.eval()
    table = torch.zeros(2, n_total, N_LABELS, device=device)
    for x, y, pos in loader:
        x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
        pos = pos.to(device)
        table[0, pos] = out.float().sigmoid()
        table[1, pos] = y.to(device)
    dist.all_reduce(table)  # each row was filled by one rank, zero in the others
    return average_precision(table[0], table[1]).mean().item()


class Positions(Dataset):
    """A part of a data set whose items say where in the whole part they are."""

    def __init__(self, dataset, indices, rank, world):
        self.dataset, self.indices, self.mine = dataset, indices, range(rank, len(indices), world)

    def __len__(self):
        return len(self.mine)

    def __getitem__(self, i):
        x, y, _ = self.dataset[self.indices[self.mine[i]]]
        return x, y, self.mine[i]


def main(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.backends.cudnn.benchmark = True

    dataset = PatchDataset(args.data)
    train_set, val_indices = split(dataset, 0.1, args.label_fraction, args.seed)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, drop_last=True)
    train_loader = DataLoader(
        train_set, args.total_batch // world, sampler=sampler, num_workers=args.workers_per_process,
        pin_memory=True, drop_last=True, persistent_workers=True,
    )
    val_loader = DataLoader(
        Positions(dataset, val_indices, rank, world), 128, num_workers=args.workers_per_process, pin_memory=True
    )

    torch.manual_seed(args.seed)
    model = make_model().to(device=device, memory_format=torch.channels_last)
    ddp = DDP(model, device_ids=[local_rank], gradient_as_bucket_view=True)
    net = torch.compile(model)
    torch.manual_seed(args.seed + 100 + rank)
    random.seed(args.seed + 100 + rank)

    # args.lr is tuned for args.total_batch, which doesn't depend on the number of processes
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, weight_decay=1e-2, fused=True)
    steps = args.epochs * len(train_loader)
    warmup = steps // 20
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: s / max(1, warmup) if s < warmup else 0.5 * (1 + math.cos(math.pi * (s - warmup) / (steps - warmup))),
    )

    first, best = 0, 0.0
    last_file = Path(args.out) / "last.pt"
    if args.resume:
        state = torch.load(last_file, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first, best = state["epoch"] + 1, state["best"]

    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        running = torch.zeros((), device=device)
        for x, y, _ in train_loader:
            x = augment(x.to(device, non_blocking=True))
            y = y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(net(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            running += loss.detach()
        # full batches only and equally many on all ranks: the mean over ranks is the mean over samples
        running /= len(train_loader)
        dist.all_reduce(running, op=dist.ReduceOp.AVG)
        score = evaluate(model, val_loader, len(val_indices), device)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item():.4f} mAP {score:.4f}", flush=True)
            if score > best:
                torch.save(model.state_dict(), Path(args.out) / "best.pt")
        best = max(best, score)
        if rank == 0:
            torch.save(
                {
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "epoch": epoch, "best": best,
                },
                last_file,
            )


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True, help="an existing folder for this run")
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--total-batch", type=int, default=512)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--label-fraction", type=float, default=1.0)
    ap.add_argument("--workers-per-process", type=int, default=6)
    ap.add_argument("--seed", type=int, default=99)
    arguments = ap.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    main(arguments)
    dist.destroy_process_group()
