# expect: none
"""Character language model, sharded with FSDP2 (fully_shard). torchrun --nproc_per_node 8 charlm.py ..."""
import argparse
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Windows(Dataset):
    """Non-overlapping windows of a byte file."""

    def __init__(self, path, block):
        self.text, self.block = np.memmap(path, dtype=np.uint8, mode="r"), block

    def __len__(self):
        return (len(self.text) - 1) // self.block

    def __getitem__(self, i):
        chunk = torch.from_numpy(self.text[i * self.block : (i + 1) * self.block + 1].astype(np.int64))
        return chunk[:-1], chunk[1:]


class Share(Dataset):
    """A rank's share for evaluation. All shares are equally long, since each forward is a collective under FSDP;
    what fills up the last ones has weight 0."""

    def __init__(self, base, rank, world):
        self.base, self.rank, self.world = base, rank, world

    def __len__(self):
        return math.ceil(len(self.base) / self.world)

    def __getitem__(self, i):
        j = i * self.world + self.rank
        x, y = self.base[min(j, len(self.base) - 1)]
        return x, y, float(j < len(self.base))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.p = heads, dropout
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        p = self.p if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class CharLM(nn.Module):
    def __init__(self, block, dim=768, heads=12, depth=12, dropout=0.1):
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, dim), nn.Embedding(block, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.ln(x))


def build_model(args, device):
    torch.manual_seed(args.seed)  # alike on all ranks: fully_shard keeps each one's part of its own weights
    model = CharLM(args.block).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for blk in model.blocks:
        fully_shard(blk, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def save(path, model, optimizer, scheduler, epoch, best):
    """All ranks take part in putting the state together, the first one writes it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        state = {"model": model_state, "optim": optim_state, "sched": scheduler.state_dict(), "epoch": epoch, "best": best}
        torch.save(state, path)


def resume(path, model, optimizer, scheduler):
    state = torch.load(path, map_location="cpu", weights_only=True)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )
    scheduler.load_state_dict(state["sched"])
    return state["epoch"] + 1, state["best"]


def char_loss(logits, targets, reduction="mean"):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    totals = torch.zeros(2, device=device)
    for ids, targets, weight in loader:
        ids, targets, weight = ids.to(device), targets.to(device), weight.to(device)
        nll = char_loss(model(ids), targets, reduction="none").view(targets.shape).sum(1)
        totals[0] += (nll * weight).sum()
        totals[1] += weight.sum() * targets.shape[1]
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item() / math.log(2)


def train(args, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, valid_set = Windows(args.train, args.block), Windows(args.valid, args.block)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.micro_batch, sampler=sampler, num_workers=2, drop_last=True)
    valid_loader = DataLoader(Share(valid_set, rank, world), args.micro_batch)

    model = build_model(args, device)
    # args.lr was found with one process, its batch is multiplied by the others
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * math.sqrt(world), betas=(0.9, 0.95))
    updates = math.ceil(len(train_loader) / args.accum) * args.epochs
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    start, best = resume(args.resume, model, optimizer, scheduler) if args.resume else (0, float("inf"))
    torch.manual_seed(args.seed + 1 + rank + world * start)  # dropout is each rank's own

    for epoch in range(start, args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        n = len(train_loader)
        loss_sum = torch.zeros((), device=device)
        for i, (ids, targets) in enumerate(train_loader):
            first = i // args.accum * args.accum
            size = min(args.accum, n - first)
            last = i == first + size - 1
            model.set_requires_gradient_sync(last)
            loss = char_loss(model(ids.to(device)), targets.to(device))
            (loss / size).backward()
            loss_sum += loss.detach()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        loss_sum /= n
        dist.all_reduce(loss_sum, op=dist.ReduceOp.AVG)  # all ranks have the same number of full batches
        bits = evaluate(model, valid_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: train {loss_sum.item() / math.log(2):.4f} valid {bits:.4f} bits per char", flush=True)
        if bits < best:
            best = bits
            save(os.path.join(args.out, "best.pt"), model, optimizer, scheduler, epoch, best)
        save(os.path.join(args.out, "last.pt"), model, optimizer, scheduler, epoch, best)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", required=True)
    ap.add_argument("--valid", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--resume")
    ap.add_argument("--block", type=int, default=1024)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--micro-batch", type=int, default=8, help="windows per rank and backward")
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=2e-4, help="of a run on one GPU")
    ap.add_argument("--seed", type=int, default=8)
    args = ap.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
