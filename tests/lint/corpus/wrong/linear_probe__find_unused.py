# expect: find-unused line 111
"""Linear probe on frozen self-supervised features, one classifier for every learning rate of a sweep.

torchrun --nproc_per_node=8 linear_probe.py --arch vit_small_patch16_224.dino --pretrained-weights dino.pth ...
"""
import argparse
import os
import time

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms


def get_args():
    p = argparse.ArgumentParser("linear probe")
    p.add_argument("--arch", default="vit_small_patch16_224.dino")
    p.add_argument("--pretrained-weights", required=True)
    p.add_argument("--data-path", required=True)
    p.add_argument("--num-labels", type=int, default=1000)
    p.add_argument("--batch-size-per-gpu", type=int, default=128)
    p.add_argument("--lrs", type=float, nargs="+", default=[0.0005, 0.001, 0.002, 0.005, 0.01],
                   help="at 256 images over all GPUs, scaled linearly")
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--num-workers", type=int, default=8, help="data loading workers per GPU")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output-dir", default=".")
    return p.parse_args()


class Sweep(nn.Module):
    """Independent linear classifiers side by side; each sees the same features."""

    def __init__(self, width, labels, count):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, labels) for _ in range(count))
        for head in self.heads:
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)

    def forward(self, features):
        return [head(features) for head in self.heads]


def frozen_backbone(args):
    net = timm.create_model(args.arch, num_classes=0)
    weights = torch.load(args.pretrained_weights, map_location="cpu", weights_only=True)
    net.load_state_dict(weights)
    return net.eval().requires_grad_(False)


def build_loaders(args):
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    train = datasets.ImageFolder(os.path.join(args.data_path, "train"), transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]))
    val = datasets.ImageFolder(os.path.join(args.data_path, "val"), transforms.Compose([
        transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize]))
    kw = dict(batch_size=args.batch_size_per_gpu, num_workers=args.num_workers, pin_memory=True)
    train_loader = DataLoader(train, sampler=DistributedSampler(train, seed=args.seed), drop_last=True, **kw)
    val_loader = DataLoader(Subset(val, range(dist.get_rank(), len(val), dist.get_world_size())), **kw)
    return train_loader, val_loader


def train_one(backbone, sweep, loader, optimizer):
    sweep.train()
    start, losses = time.time(), 0
    for step, (image, target) in enumerate(loader):
        image, target = image.cuda(non_blocking=True), target.cuda(non_blocking=True)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            features = backbone(image)
        outputs = sweep(features.float())
        head_losses = torch.stack([nn.functional.cross_entropy(o, target) for o in outputs])
        optimizer.zero_grad()
        head_losses.sum().backward()
        optimizer.step()
        losses = losses + head_losses.detach()
    losses = losses / len(loader)
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    return losses.tolist(), time.time() - start


@torch.no_grad()
def validate(backbone, sweep, loader, heads):
    sweep.eval()
    hits = torch.zeros(heads, device="cuda")
    seen = torch.zeros(1, device="cuda")
    for image, target in loader:
        image, target = image.cuda(non_blocking=True), target.cuda(non_blocking=True)
        outputs = sweep(backbone(image))
        hits += torch.stack([(o.argmax(1) == target).sum() for o in outputs])
        seen += image.size(0)
    both = torch.cat([hits, seen])
    dist.all_reduce(both)
    return (both[:-1] / both[-1]).tolist()


def main():
    args = get_args()
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.manual_seed(args.seed + dist.get_rank())
    is_main = dist.get_rank() == 0

    backbone = frozen_backbone(args).cuda()
    train_loader, val_loader = build_loaders(args)
    sweep = Sweep(backbone.num_features, args.num_labels, len(args.lrs)).cuda()
    ddp_sweep = nn.parallel.DistributedDataParallel(sweep, device_ids=[gpu], find_unused_parameters=True)
    scale = args.batch_size_per_gpu * dist.get_world_size() / 256
    groups = [{"params": h.parameters(), "lr": lr * scale} for h, lr in zip(sweep.heads, args.lrs)]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs, eta_min=0)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        losses, seconds = train_one(backbone, ddp_sweep, train_loader, optimizer)
        scheduler.step()
        accs = validate(backbone, sweep, val_loader, len(args.lrs))
        if is_main:
            rows = ", ".join(f"{lr:g}: {loss:.3f}/{a:.3%}" for lr, loss, a in zip(args.lrs, losses, accs))
            print(f"epoch {epoch} ({seconds:.0f} s)  {rows}")
    if is_main:
        os.makedirs(args.output_dir, exist_ok=True)
        torch.save({"heads": sweep.state_dict(), "lrs": args.lrs}, os.path.join(args.output_dir, "probe.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
