# expect: local-rank-argument line 37 or 136 or 137
"""ViT-L/16 from scratch on a folder of scenes, sharded with FSDP.

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HOST fsdp_scenes_vit.py ...
"""
import argparse
import functools
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.models.vision_transformer import EncoderBlock, vit_l_16
from torchvision.transforms import v2

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--ckpt", required=True, help="checkpoint of this run, read if it is there")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--per-gpu-batch", type=int, default=64)
    parser.add_argument("--lr-per-256", type=float, default=5e-4, help="rate for 256 images over all GPUs")
    parser.add_argument("--warmup-steps", type=int, default=2000)
    parser.add_argument("--workers-per-gpu", type=int, default=6)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--local_rank", type=int, default=0, help="filled in by the launcher")
    return parser.parse_args()


def build_loaders(args, rank, world):
    finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    train_ds = ImageFolder(
        os.path.join(args.root, "train"), v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *finish])
    )
    val_ds = ImageFolder(os.path.join(args.root, "val"), v2.Compose([v2.Resize(256), v2.CenterCrop(224), *finish]))
    # the loader's generator is where its workers' seeds come from: one for each rank
    generator = torch.Generator().manual_seed(args.seed + rank)
    train_dl = DataLoader(
        train_ds,
        args.per_gpu_batch,
        sampler=DistributedSampler(train_ds, world, rank, shuffle=True, seed=args.seed),
        num_workers=args.workers_per_gpu,
        pin_memory=True,
        drop_last=True,
        generator=generator,
    )
    # every forward of a sharded model is a collective, so all ranks get equally many batches (padded, see evaluate)
    val_dl = DataLoader(
        val_ds,
        args.per_gpu_batch,
        sampler=DistributedSampler(val_ds, world, rank, shuffle=False),
        num_workers=args.workers_per_gpu,
        pin_memory=True,
    )
    return train_dl, val_dl


def build_model(args, n_classes, device):
    torch.manual_seed(args.seed)  # the same weights on all ranks before they are cut into shards
    model = vit_l_16(num_classes=n_classes, dropout=0.1)
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={EncoderBlock}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=device,
        use_orig_params=True,
    )


def train_epoch(model, loader, optimizer, scheduler, device):
    model.train()
    loss_sum = torch.zeros((), device=device)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = F.cross_entropy(model(x).float(), y, label_smoothing=0.11)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        loss_sum += loss.detach()
    dist.all_reduce(loss_sum, op=dist.ReduceOp.AVG)  # the same number of full batches everywhere
    return loss_sum.item() / len(loader)


@torch.no_grad()
def evaluate(model, loader, device, rank, world):
    model.eval()
    size = len(loader.dataset)
    counts = torch.zeros(2, dtype=torch.long, device=device)
    position = rank  # of the next image in the whole set; from `size` on the sampler repeats
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        where = position + world * torch.arange(len(y), device=device)
        position += world * len(y)
        real = where < size
        counts[0] += ((model(x).argmax(dim=1) == y) & real).sum()
        counts[1] += real.sum()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def save(path, model, optimizer, scheduler, epoch, rank):
    weights, optim = get_state_dict(model, optimizer, options=FULL)  # all ranks gather, rank 0 gets it
    if rank == 0:
        state = {"model": weights, "optim": optim, "scheduler": scheduler.state_dict(), "epoch": epoch}
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def restore(path, model, optimizer, scheduler):
    state = torch.load(path, map_location="cpu", weights_only=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=FULL
    )
    scheduler.load_state_dict(state["scheduler"])
    return state["epoch"] + 1


def main():
    args = parse_args()
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", args.local_rank)
    torch.cuda.set_device(device)

    train_dl, val_dl = build_loaders(args, rank, world)
    model = build_model(args, len(train_dl.dataset.classes), device)
    torch.manual_seed(args.seed + 1 + rank)  # dropout: each rank its own

    lr = args.lr_per_256 * args.per_gpu_batch * world / 256
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    total = args.epochs * len(train_dl)

    def shape(step):
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        done = (step - args.warmup_steps) / max(1, total - args.warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    start = restore(args.ckpt, model, optimizer, scheduler) if os.path.exists(args.ckpt) else 0

    for epoch in range(start, args.epochs):
        train_dl.sampler.set_epoch(epoch)
        loss = train_epoch(model, train_dl, optimizer, scheduler, device)
        acc = evaluate(model, val_dl, device, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} accuracy {acc:.4f}", flush=True)
        save(args.ckpt, model, optimizer, scheduler, epoch, rank)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
