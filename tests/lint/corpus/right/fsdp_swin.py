# expect: none
"""FSDP fine-tuning of a Swin transformer:  torchrun --nproc_per_node=8 fsdp_swin.py DATA OUT"""
import functools
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import (FullOptimStateDictConfig, FullStateDictConfig, MixedPrecision,
                                    StateDictType)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.models.swin_transformer import SwinTransformerBlock, swin_b
from torchvision.transforms import v2

EPOCHS = 30
BATCH = 24              # per GPU
LR_PER_512 = 5e-4       # for 512 images per step
SEED = 77


def tf(train):
    front = [v2.RandomResizedCrop(224), v2.RandAugment()] if train else [v2.Resize(238), v2.CenterCrop(224)]
    return v2.Compose([v2.ToImage(), *front, v2.ToDtype(torch.float32, scale=True),
                       v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])


def shard(model, gpu):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={SwinTransformerBlock})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=bf16, device_id=gpu, use_orig_params=True)


def full_state(model):
    return FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                                FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
                                FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True))


def save(path, model, optimizer, scheduler, epoch):
    with full_state(model):
        weights = model.state_dict()
        moments = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optim": moments, "sched": scheduler.state_dict(), "epoch": epoch}, path)
    dist.barrier()


@torch.no_grad()
def accuracy(model, loader, total, gpu):
    # all ranks must run equally many forwards, so the sampler pads and the padding is masked out
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    hits = torch.zeros((), device=gpu)
    position = rank
    for images, labels in loader:
        where = position + world * torch.arange(len(labels), device=gpu)
        labels = labels.to(gpu, non_blocking=True)
        same = model(images.to(gpu, non_blocking=True)).argmax(1) == labels
        hits += (same & (where < total)).sum()
        position += world * len(labels)
    dist.all_reduce(hits)
    return hits.item() / total


def main(data, out):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)

    train_set, val_set = ImageFolder(f"{data}/train", tf(True)), ImageFolder(f"{data}/val", tf(False))
    train_sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, BATCH, sampler=train_sampler, num_workers=6, drop_last=True,
                              generator=torch.Generator().manual_seed(SEED + rank))
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, BATCH, sampler=val_sampler, num_workers=6)

    torch.manual_seed(SEED)
    model = swin_b(num_classes=len(train_set.classes))
    resume = os.path.join(out, "fsdp.pt")
    saved = None
    if os.path.exists(resume):
        saved = torch.load(resume, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
    model = shard(model, gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR_PER_512 * BATCH * world / 512, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader))
    start = 0
    if saved is not None:
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optim"]))
        scheduler.load_state_dict(saved["sched"])
        start = saved["epoch"] + 1
    # stochastic depth must differ between the ranks from here on
    torch.manual_seed(SEED + rank)

    os.makedirs(out, exist_ok=True)
    for epoch in range(start, EPOCHS):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            logits = model(images.to(gpu, non_blocking=True)).float()
            loss = F.cross_entropy(logits, labels.to(gpu, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
        acc = accuracy(model, val_loader, len(val_set), gpu)
        if rank == 0:
            print(f"epoch {epoch} accuracy {acc:.4f}", flush=True)
        save(resume, model, optimizer, scheduler, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
