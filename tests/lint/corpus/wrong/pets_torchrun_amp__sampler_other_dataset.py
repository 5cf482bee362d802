# expect: sampler-other-dataset line 51 or 61
"""Fine-tune a ResNet-50 on the Oxford-IIIT pets.

    torchrun --nproc_per_node=4 pets_torchrun_amp.py --data-dir DIR --out DIR
"""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models
from torchvision import transforms as T

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data-dir", required=True)
    p.add_argument("--out", required=True, help="folder of this run")
    p.add_argument("--epochs", type=int, default=15)
    p.add_argument("--batch-size", type=int, default=128, help="images per step, over all GPUs")
    p.add_argument("--lr", type=float, default=0.02, help="peak rate, for the whole batch")
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--workers", type=int, default=4, help="loader workers of each process")
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


def prepare(args, local_rank):
    """One process of each machine gets the images and the pretrained weights, the others wait for it."""
    if local_rank == 0:
        for split in ("trainval", "test"):
            datasets.OxfordIIITPet(args.data_dir, split=split, download=True)
        models.ResNet50_Weights.DEFAULT.get_state_dict(progress=False)
    dist.barrier()


def build_loaders(args, rank, world_size):
    augment = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)])
    plain = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), T.Normalize(MEAN, STD)])
    full_aug = datasets.OxfordIIITPet(args.data_dir, split="trainval", transform=augment)
    full_plain = datasets.OxfordIIITPet(args.data_dir, split="trainval", transform=plain)
    test_set = datasets.OxfordIIITPet(args.data_dir, split="test", transform=plain)
    sampler = DistributedSampler(full_aug, num_replicas=world_size, rank=rank, shuffle=True, seed=args.seed)

    # the split has to be the same everywhere, so it has a generator of its own
    order = torch.randperm(len(full_aug), generator=torch.Generator().manual_seed(args.seed)).tolist()
    n_val = len(order) // 5
    train_set = Subset(full_aug, order[n_val:])
    val_idx = order[:n_val]

    per_gpu = args.batch_size // world_size
    common = dict(num_workers=args.workers, pin_memory=True)
    train_loader = DataLoader(train_set, batch_size=per_gpu, sampler=sampler, drop_last=True, **common)
    # evaluation: every image on exactly one rank, nothing is repeated
    val_loader = DataLoader(Subset(full_plain, val_idx[rank::world_size]), batch_size=per_gpu, **common)
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, batch_size=per_gpu, **common)
    return train_loader, val_loader, test_loader, sampler


def train_one_epoch(model, loader, criterion, optimizer, scheduler, scaler, device, clip):
    model.train()
    total = torch.zeros(2, device=device)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        total[0] += loss.detach() * labels.size(0)
        total[1] += labels.size(0)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device, dtype=torch.long)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        # the bare module: the ranks may have different numbers of batches here
        pred = model.module(images).argmax(dim=1)
        counts[0] += (pred == labels).sum()
        counts[1] += labels.numel()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    args = get_args()
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    prepare(args, local_rank)
    torch.manual_seed(args.seed + rank)
    train_loader, val_loader, test_loader, sampler = build_loaders(args, rank, world_size)

    model = models.resnet50(weights=models.ResNet50_Weights.DEFAULT)
    model.fc = nn.Sequential(nn.Dropout(0.3), nn.Linear(model.fc.in_features, 37))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DDP(model, device_ids=[local_rank])

    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    scaler = torch.amp.GradScaler("cuda")

    start_epoch, best_acc = 0, 0.0
    last, best = out / "last.pt", out / "best.pt"
    if args.resume and last.exists():
        ckpt = torch.load(last, map_location=device, weights_only=True)
        model.module.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        scaler.load_state_dict(ckpt["scaler"])
        start_epoch, best_acc = ckpt["epoch"] + 1, ckpt["best_acc"]

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, criterion, optimizer, scheduler, scaler, device, args.clip)
        acc = evaluate(model, val_loader, device)
        improved = acc > best_acc
        best_acc = max(acc, best_acc)
        if rank == 0:
            print(f"epoch {epoch:3d}  loss {loss:.4f}  val acc {acc:.4f}", flush=True)
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "epoch": epoch,
                "best_acc": best_acc,
            }
            torch.save(state, last)
            if improved:
                torch.save(model.module.state_dict(), best)

    dist.barrier()  # best.pt is complete once rank 0 is here
    model.module.load_state_dict(torch.load(best, map_location=device, weights_only=True))
    test_acc = evaluate(model, test_loader, device)
    if rank == 0:
        print(f"test accuracy {test_acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
