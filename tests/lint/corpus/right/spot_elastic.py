# expect: none
"""Training on pre-emptible machines.

The job may be stopped at any time and come back with another number of processes. The global batch stays as it
is, the position within the epoch is counted in samples, and the checkpoint holds all that is needed to go on.

    torchrun --nnodes=1:4 --nproc-per-node=8 --max-restarts=100 --rdzv-backend=c10d --rdzv-endpoint=$HOST spot.py ...
"""
import argparse
import os
import signal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

CHECK_EVERY = 50  # steps between two looks at whether the machine is to be given up

got_sigterm = False


def on_sigterm(signum, frame):
    global got_sigterm
    got_sigterm = True


class ElasticSampler(Sampler):
    """The epoch's permutation without its first `consumed` samples, dealt out to the ranks there are now."""

    def __init__(self, length, rank, world, seed):
        self.length, self.rank, self.world, self.seed = length, rank, world, seed
        self.epoch, self.consumed = 0, 0

    def set_epoch(self, epoch, consumed=0):
        self.epoch, self.consumed = epoch, consumed

    def __len__(self):
        return (self.length - self.consumed) // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        rest = torch.randperm(self.length, generator=g)[self.consumed :]
        rest = rest[: len(self) * self.world]
        return iter(rest[self.rank :: self.world].tolist())


class SpectrumNet(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(n_in, 1024), nn.LayerNorm(1024), nn.GELU(), nn.Dropout(0.2),
            nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU(), nn.Dropout(0.2),
        )
        self.out = nn.Linear(1024, n_out)

    def forward(self, x):
        return self.out(self.body(x))


def read_split(path):
    with np.load(path) as f:
        return TensorDataset(torch.from_numpy(f["x"]).float(), torch.from_numpy(f["y"]).long())


class Checkpointer:
    def __init__(self, folder, model, optimizer, scheduler):
        self.path = os.path.join(folder, "state.pt")
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def save(self, epoch, consumed):
        """Called by all ranks, written by the first. A file is either the old one or whole."""
        if dist.get_rank() == 0:
            payload = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "epoch": epoch,
                "consumed": consumed,
            }
            torch.save(payload, self.path + ".part")
            os.replace(self.path + ".part", self.path)
        dist.barrier()

    def restore(self, device):
        if not os.path.exists(self.path):
            return 0, 0
        payload = torch.load(self.path, map_location=device, weights_only=True)
        self.model.load_state_dict(payload["model"])
        self.optimizer.load_state_dict(payload["optimizer"])
        self.scheduler.load_state_dict(payload["scheduler"])
        return payload["epoch"], payload["consumed"]


def stop_requested(device):
    """Whether any rank has had the signal; a collective, so all ranks leave at the same step."""
    flag = torch.tensor(int(got_sigterm), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


@torch.no_grad()
def accuracy(model, dataset, device):
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (t[rank::world] for t in dataset.tensors)
    hits = torch.zeros(2, device=device)
    for xb, yb in zip(x.split(2048), y.split(2048)):
        hits[0] += (model(xb.to(device)).argmax(1) == yb.to(device)).sum()
        hits[1] += len(yb)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def train(args, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.global_batch % world:
        raise SystemExit(f"{args.global_batch} samples can't be shared by {world} processes")
    per_rank = args.global_batch // world

    train_set, val_set = read_split(args.train), read_split(args.val)
    sampler = ElasticSampler(len(train_set), rank, world, args.seed)
    loader = DataLoader(train_set, batch_size=per_rank, sampler=sampler, drop_last=True, pin_memory=True)

    torch.manual_seed(args.seed)
    model = SpectrumNet(train_set.tensors[0].shape[1], args.classes).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)  # for the global batch
    steps_per_epoch = len(train_set) // args.global_batch
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * steps_per_epoch)
    checkpointer = Checkpointer(args.folder, model, optimizer, scheduler)
    first_epoch, consumed = checkpointer.restore(device)
    torch.manual_seed(args.seed + 7919 * (rank + 1) + first_epoch)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch, consumed)
        ddp.train()
        loss_sum = torch.zeros(2, device=device)
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(ddp(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            consumed += args.global_batch
            loss_sum[0] += loss.detach()
            loss_sum[1] += 1
            if step % CHECK_EVERY == CHECK_EVERY - 1 and stop_requested(device):
                checkpointer.save(epoch, consumed)
                return
        consumed = 0
        checkpointer.save(epoch + 1, consumed)
        dist.all_reduce(loss_sum)
        acc = accuracy(model, val_set, device)
        if rank == 0:
            print(f"epoch {epoch} loss {(loss_sum[0] / loss_sum[1].clamp(min=1)).item():.4f} accuracy {acc:.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", required=True)
    ap.add_argument("--val", required=True)
    ap.add_argument("--folder", required=True, help="this job's own folder, on storage that outlives the machines")
    ap.add_argument("--classes", type=int, default=40)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--global-batch", type=int, default=4096)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()
    signal.signal(signal.SIGTERM, on_sigterm)
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    try:
        train(args, torch.device("cuda", local_rank))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
