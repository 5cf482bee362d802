# expect: no-sync-missing line 53 or 52 or 48 or 54
"""Train a small vision transformer with Lightning Fabric.

    python fabric_windows.py --devices 4 --data /data/pets --folder runs/pets
"""
import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, models, transforms


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=512, help="images per update, all devices and micro batches")
    parser.add_argument("--micro", type=int, default=32, help="images per device and forward")
    parser.add_argument("--lr", type=float, default=1e-3, help="for --batch images")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4, help="for each device")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def loaders(opts, fabric):
    centre = transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    train = datasets.ImageFolder(opts.data / "train", transforms.Compose([
        transforms.RandomResizedCrop(160), transforms.TrivialAugmentWide(), transforms.ToTensor(), centre]))
    val = datasets.ImageFolder(opts.data / "val", transforms.Compose([
        transforms.Resize(176), transforms.CenterCrop(160), transforms.ToTensor(), centre]))
    sampler = DistributedSampler(train, num_replicas=fabric.world_size, rank=fabric.global_rank, seed=opts.seed)
    feed = DataLoader(train, batch_size=opts.micro, sampler=sampler, drop_last=True,
                      num_workers=opts.workers, pin_memory=True)
    mine = Subset(val, range(fabric.global_rank, len(val), fabric.world_size))
    check = DataLoader(mine, batch_size=opts.micro, num_workers=opts.workers, pin_memory=True)
    return feed, check, len(train.classes)


def train_one_epoch(fabric, model, optimizer, feed, accumulate):
    model.train()
    total = torch.zeros((), device=fabric.device)
    count = len(feed)
    for number, batch in enumerate(feed):
        images, labels = fabric.to_device(batch)
        window = min(accumulate, count - number // accumulate * accumulate)
        complete = (number + 1) % accumulate == 0 or number + 1 == count
        loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss / window)
        if complete:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
    return fabric.all_reduce(total / count, reduce_op="mean")   # all have `count` full batches


@torch.no_grad()
def validate(fabric, model, check):
    model.eval()
    bare = model.module
    sums = torch.zeros(2, device=fabric.device)
    for batch in check:
        images, labels = fabric.to_device(batch)
        sums[0] += (bare(images).argmax(dim=1) == labels).sum()
        sums[1] += labels.size(0)
    sums = fabric.all_reduce(sums, reduce_op="sum")
    return (sums[0] / sums[1]).item()


def main():
    opts = options()
    fabric = Fabric(accelerator="cuda", devices=opts.devices, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    accumulate, rest = divmod(opts.batch, opts.micro * fabric.world_size)
    if rest:
        raise SystemExit("--batch must be a multiple of --micro times the number of devices")

    feed, check, classes = loaders(opts, fabric)
    fabric.seed_everything(opts.seed)
    network = models.VisionTransformer(image_size=160, patch_size=16, num_layers=8, num_heads=6,
                                       hidden_dim=384, mlp_dim=1536, dropout=0.1, num_classes=classes)
    optimizer = torch.optim.AdamW(network.parameters(), lr=opts.lr, weight_decay=0.1)
    model, optimizer = fabric.setup(network, optimizer)
    fabric.seed_everything(opts.seed + 1 + fabric.global_rank)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=opts.epochs)

    first = 0
    path = opts.folder / "last.ckpt"
    if path.exists():
        saved = torch.load(path, map_location=fabric.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["epoch"] + 1

    for epoch in range(first, opts.epochs):
        feed.sampler.set_epoch(epoch)
        loss = train_one_epoch(fabric, model, optimizer, feed, accumulate)
        scheduler.step()
        accuracy = validate(fabric, model, check)
        fabric.print(f"epoch {epoch:3d}  loss {loss.item():.4f}  accuracy {accuracy:.4f}")
        fabric.save(path, {"model": model, "optimizer": optimizer, "scheduler": scheduler.state_dict(),
                           "epoch": epoch})


if __name__ == "__main__":
    main()
