# expect: best-unreduced line 225 or 143 or 146 or 224 or 226 or 237
"""Abdominal organ segmentation on CT volumes, data given as a datalist of npz files."""

import argparse
import json
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler


class LoadVolumed:
    def __call__(self, data):
        with np.load(data["file"]) as f:
            return {"image": f["image"].astype(np.float32)[None], "label": f["label"].astype(np.int64)}


class ScaleIntensityRanged:
    def __init__(self, a_min=-175.0, a_max=250.0):
        self.a_min, self.a_max = a_min, a_max

    def __call__(self, data):
        img = np.clip(data["image"], self.a_min, self.a_max)
        data["image"] = (img - self.a_min) / (self.a_max - self.a_min)
        return data


class NormalizeIntensityd:
    def __call__(self, data):
        img = data["image"]
        data["image"] = (img - img.mean()) / (img.std() + 1e-5)
        return data


class Randomizable:
    R = np.random.RandomState()

    def set_random_state(self, seed):
        self.R = np.random.RandomState(seed)


class RandSpatialCropd(Randomizable):
    def __init__(self, roi_size):
        self.roi_size = roi_size

    def __call__(self, data):
        shape = data["label"].shape
        start = [self.R.randint(0, max(1, s - r + 1)) for s, r in zip(shape, self.roi_size)]
        box = tuple(slice(s, s + r) for s, r in zip(start, self.roi_size))
        return {"image": data["image"][(slice(None),) + box], "label": data["label"][box]}


class RandFlipd(Randomizable):
    def __call__(self, data):
        for axis in range(3):
            if self.R.rand() < 0.5:
                data = {"image": np.flip(data["image"], axis + 1), "label": np.flip(data["label"], axis)}
        return data


class VolumeDataset(Dataset):
    def __init__(self, files, transforms):
        self.files, self.transforms = files, transforms

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        data = {"file": self.files[index]}
        for transform in self.transforms:
            data = transform(data)
        return {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in data.items()}

    def set_random_state(self, seed):
        for i, transform in enumerate(self.transforms):
            if isinstance(transform, Randomizable):
                transform.set_random_state((seed + i) % 2**32)


def worker_init_fn(worker_id):
    # torch's seed of this worker: differs between workers, epochs and (main() seeds by rank) processes
    get_worker_info().dataset.set_random_state(torch.initial_seed() % 2**32)


def partition_dataset(data, num_partitions, index):
    """Disjoint parts which together are the whole; they may differ by one in length."""
    return data[index::num_partitions]


def conv_block(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv3d(cin, cout, 3, stride, 1, bias=False), nn.InstanceNorm3d(cout, affine=True), nn.LeakyReLU(0.01)
    )


class SmallUNet(nn.Module):
    def __init__(self, out_channels, f=(32, 64, 128)):
        super().__init__()
        self.enc0, self.enc1, self.enc2 = conv_block(1, f[0]), conv_block(f[0], f[1], 2), conv_block(f[1], f[2], 2)
        self.up1, self.dec1 = nn.ConvTranspose3d(f[2], f[1], 2, 2), conv_block(2 * f[1], f[1])
        self.up0, self.dec0 = nn.ConvTranspose3d(f[1], f[0], 2, 2), conv_block(2 * f[0], f[0])
        self.drop = nn.Dropout3d(0.1)
        self.head = nn.Conv3d(f[0], out_channels, 1)

    def forward(self, x):
        x0 = self.enc0(x)
        x1 = self.enc1(x0)
        x2 = self.drop(self.enc2(x1))
        x1 = self.dec1(torch.cat([self.up1(x2), x1], dim=1))
        return self.head(self.dec0(torch.cat([self.up0(x1), x0], dim=1)))


def dice_ce_loss(logits, label):
    probs = logits.softmax(1)
    onehot = F.one_hot(label, logits.shape[1]).movedim(-1, 1).float()
    inter = (probs * onehot).sum((2, 3, 4))
    denom = probs.sum((2, 3, 4)) + onehot.sum((2, 3, 4))
    return F.cross_entropy(logits, label) + 1 - ((2 * inter + 1e-5) / (denom + 1e-5)).mean()


@torch.no_grad()
def validate(model, val_loader, num_classes, device):
    model.eval()
    # for each foreground class: the sum of the cases' Dice, and the number of cases which have that organ
    dice_sum = torch.zeros(2, num_classes - 1, device=device)
    for batch in val_loader:
        image, label = batch["image"].to(device), batch["label"].to(device)
        d, h, w = image.shape[2:]
        padded = F.pad(image, (0, -w % 4, 0, -h % 4, 0, -d % 4))
        pred = model(padded)[:, :, :d, :h, :w].argmax(1)
        for c in range(1, num_classes):
            p, t = pred == c, label == c
            present = t.any()
            dice = 2 * (p & t).sum() / (p.sum() + t.sum()).clamp(min=1)
            dice_sum[0, c - 1] += torch.where(present, dice, 0)
            dice_sum[1, c - 1] += present
    metric = (dice_sum[0] / dice_sum[1].clamp(min=1)).mean().item()
    dist.all_reduce(dice_sum, op=dist.ReduceOp.SUM)
    per_class = dice_sum[0] / dice_sum[1].clamp(min=1)
    return metric, per_class


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--datalist", required=True)
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--num_classes", default=14, type=int)
    parser.add_argument("--max_epochs", default=600, type=int)
    parser.add_argument("--val_interval", default=5, type=int)
    parser.add_argument("--batch_size", default=16, type=int, help="crops of all GPUs together")
    parser.add_argument("--lr", default=1e-3, type=float, help="for that batch size")
    parser.add_argument("--workers_per_gpu", default=4, type=int)
    parser.add_argument("--seed", default=2, type=int)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        os.makedirs(args.model_dir, exist_ok=True)

    with open(args.datalist) as f:
        datalist = json.load(f)
    val_files = partition_dataset(datalist["validation"], num_partitions=world_size, index=rank)
    fixed = [LoadVolumed(), ScaleIntensityRanged(), NormalizeIntensityd()]
    train_ds = VolumeDataset(datalist["training"], fixed + [RandSpatialCropd((96, 96, 96)), RandFlipd()])
    val_ds = VolumeDataset(val_files, fixed)
    train_sampler = DistributedSampler(train_ds, shuffle=True, drop_last=True)
    train_loader = DataLoader(
        train_ds,
        batch_size=args.batch_size // world_size,
        sampler=train_sampler,
        num_workers=args.workers_per_gpu,
        worker_init_fn=worker_init_fn,
        pin_memory=True,
        drop_last=True,
    )
    val_loader = DataLoader(val_ds, batch_size=1, shuffle=False, num_workers=2)

    torch.manual_seed(args.seed)
    model = SmallUNet(args.num_classes).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    torch.manual_seed(args.seed + 1 + rank)

    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.99, nesterov=True)
    lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.max_epochs, power=0.9)
    start_epoch, best_metric = 0, -1.0
    if args.checkpoint:
        ckpt = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(ckpt["state_dict"])
        optimizer.load_state_dict(ckpt["optimizer"])
        lr_scheduler.load_state_dict(ckpt["lr_scheduler"])
        start_epoch, best_metric = ckpt["epoch"] + 1, ckpt["best_metric"]

    for epoch in range(start_epoch, args.max_epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(2, device=device)
        for batch_data in train_loader:
            inputs = batch_data["image"].to(device, non_blocking=True)
            labels = batch_data["label"].to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = dice_ce_loss(model(inputs), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 12.0)
            optimizer.step()
            epoch_loss[0] += loss.detach() * inputs.shape[0]
            epoch_loss[1] += inputs.shape[0]
        lr_scheduler.step()
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.max_epochs} average loss {(epoch_loss[0] / epoch_loss[1]).item():.4f}")

        if (epoch + 1) % args.val_interval == 0:
            metric, per_class = validate(model.module, val_loader, args.num_classes, device)
            is_best = metric > best_metric
            best_metric = max(metric, best_metric)
            if rank == 0:
                print(f"epoch {epoch + 1} mean dice {per_class.mean().item():.4f}", per_class.tolist())
                checkpoint = {
                    "state_dict": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "lr_scheduler": lr_scheduler.state_dict(),
                    "epoch": epoch,
                    "best_metric": best_metric,
                }
                torch.save(checkpoint, os.path.join(args.model_dir, "model_last.pt"))
                if is_best:
                    torch.save(checkpoint["state_dict"], os.path.join(args.model_dir, "model_best.pt"))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
