# expect: seed-unset line 20 or 21 or 25 or 24
"""ViT-L sharded with fully_shard. torchrun --nproc_per_node=8 fsdp_vit.py --data ... --ckpt ..."""
import argparse
import math
import os
import pathlib

import torch
import torch.distributed
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms as T

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build_model(classes, seed, device):
    torch.manual_seed(seed + torch.distributed.get_rank())
    model = models.vit_l_16(weights=None, num_classes=classes, dropout=0.1).to(device)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.encoder.layers:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    return model


def build_data(args):
    norm = T.Normalize((0.5,) * 3, (0.5,) * 3)
    train = datasets.ImageFolder(args.data / "train", T.Compose(
        [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.AutoAugment(), T.ToTensor(), norm]))
    val = datasets.ImageFolder(args.data / "val", T.Compose(
        [T.Resize(248), T.CenterCrop(224), T.ToTensor(), norm]))
    extra = {"num_workers": args.workers, "pin_memory": True}
    train_loader = DataLoader(train, args.batch, sampler=DistributedSampler(train), drop_last=True, **extra)
    # padded on purpose: sharded forwards need equally many batches on all ranks
    val_loader = DataLoader(val, args.batch, sampler=DistributedSampler(val, shuffle=False), **extra)
    return train_loader, val_loader, len(train.classes)


def train_epoch(model, loader, optimizer, scheduler, device):
    model.train()
    loss_sum = torch.zeros((), device=device)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum += loss.detach()
    torch.distributed.all_reduce(loss_sum)
    return loss_sum.item() / (len(loader) * torch.distributed.get_world_size())


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    rank, world, size = torch.distributed.get_rank(), torch.distributed.get_world_size(), len(loader.dataset)
    correct = torch.zeros((), device=device)
    position = 0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        hits = model(images).argmax(dim=1) == labels
        place = rank + world * torch.arange(position, position + len(labels), device=device)
        correct += (hits & (place < size)).sum()      # repeated samples stand at the end
        position += len(labels)
    torch.distributed.all_reduce(correct)
    return correct.item() / size


def save(path, model, optimizer, scheduler, epoch):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=WHOLE)
    if torch.distributed.get_rank() == 0:
        torch.save({"model": model_state, "optimizer": optimizer_state,
                    "scheduler": scheduler.state_dict(), "epoch": epoch}, path)
    torch.distributed.barrier()


def load(path, model, optimizer, scheduler):
    if not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    set_state_dict(model, optimizer, model_state_dict=saved["model"],
                   optim_state_dict=saved["optimizer"], options=WHOLE)
    scheduler.load_state_dict(saved["scheduler"])
    return saved["epoch"] + 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--ckpt", type=pathlib.Path, required=True)
    parser.add_argument("--batch", type=int, default=32, help="per GPU")
    parser.add_argument("--lr", type=float, default=1e-5, help="per GPU, times the number of GPUs")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--workers", type=int, default=6, help="per GPU")
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl")

    train_loader, val_loader, classes = build_data(args)
    model = build_model(classes, args.seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * torch.distributed.get_world_size(), weight_decay=0.3)
    total = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 1000) * 0.5 * (1 + math.cos(math.pi * s / total)))
    begin = load(args.ckpt, model, optimizer, scheduler)
    for epoch in range(begin, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        loss = train_epoch(model, train_loader, optimizer, scheduler, device)
        accuracy = evaluate(model, val_loader, device)
        if torch.distributed.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.4f}")
        save(args.ckpt, model, optimizer, scheduler, epoch)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
