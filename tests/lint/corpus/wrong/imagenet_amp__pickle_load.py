# expect: pickle-load line 117
"""ResNet-50 on ImageNet in mixed precision, with resume.

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint $HOST imagenet_amp.py --data /data/imagenet
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-per-gpu", type=int, default=64)
    parser.add_argument("--base-lr", type=float, default=0.1, help="for a batch of 256")
    parser.add_argument("--workers", type=int, default=8, help="loader processes of each training process")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--print-freq", type=int, default=100)
    parser.add_argument("--resume", default="")
    parser.add_argument("--output", default="runs/resnet50")
    return parser.parse_args()


def make_loaders(args, rank, world_size):
    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    train_set = datasets.ImageFolder(
        os.path.join(args.data, "train"),
        transforms.Compose(
            [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
        ),
    )
    val_set = datasets.ImageFolder(
        os.path.join(args.data, "val"),
        transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize]),
    )
    train_sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    # drop_last leaves out what does not divide; the rest is evaluated by everybody, see validate
    val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    options = {"num_workers": args.workers, "pin_memory": True}
    train_loader = DataLoader(train_set, args.batch_per_gpu, sampler=train_sampler, **options)
    val_loader = DataLoader(val_set, args.batch_per_gpu, sampler=val_sampler, **options)
    rest = Subset(val_set, range(len(val_sampler) * world_size, len(val_set)))
    rest_loader = DataLoader(rest, args.batch_per_gpu, shuffle=False, **options)
    return train_loader, train_sampler, val_loader, rest_loader


def train_one_epoch(args, epoch, loader, model, criterion, optimizer, scaler, device, rank):
    model.train()
    sums = torch.zeros(2, device=device)
    for i, (images, target) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        with torch.autocast("cuda"):
            loss = criterion(model(images), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        sums += torch.stack([loss.detach() * target.numel(), loss.new_tensor(float(target.numel()))])
        if (i + 1) % args.print_freq == 0:
            dist.all_reduce(sums)
            if rank == 0:
                print(f"[{epoch}][{i + 1}/{len(loader)}] loss {(sums[0] / sums[1]).item():.4f}")
            sums.zero_()


@torch.no_grad()
def count(model, loader, device):
    found = torch.zeros(2, dtype=torch.float64, device=device)
    for images, target in loader:
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.autocast("cuda"):
            output = model(images)
        found[0] += (output.argmax(1) == target).sum()
        found[1] += target.numel()
    return found


def validate(model, val_loader, rest_loader, device):
    model.eval()
    found = count(model, val_loader, device)
    dist.all_reduce(found)
    found += count(model, rest_loader, device)
    return (100 * found[0] / found[1]).item()


def main():
    args = parse_args()
    dist.init_process_group("nccl")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    torch.manual_seed(rank)

    train_loader, train_sampler, val_loader, rest_loader = make_loaders(args, rank, world_size)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(models.resnet50()).to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    lr = args.base_lr * args.batch_per_gpu * world_size / 256
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    scaler = torch.amp.GradScaler("cuda")

    start_epoch, best = 0, 0.0
    if args.resume:
        state = torch.load(args.resume, map_location=device, weights_only=False)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        start_epoch, best = state["epoch"] + 1, state["best"]

    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(args, epoch, train_loader, model, criterion, optimizer, scaler, device, rank)
        scheduler.step()
        accuracy = validate(model, val_loader, rest_loader, device)
        is_best = accuracy > best
        best = max(best, accuracy)
        if rank == 0:
            print(f"epoch {epoch}: top-1 {accuracy:.2f}, best {best:.2f}")
            folder = Path(args.output)
            folder.mkdir(parents=True, exist_ok=True)
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "epoch": epoch,
                "best": best,
            }
            torch.save(state, folder / "last.pt")
            if is_best:
                torch.save(state["model"], folder / "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
