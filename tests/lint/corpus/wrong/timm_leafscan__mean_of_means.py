# expect: mean-of-means line 83 or 82
"""Leaf diseases with timm: EMA of the weights, mixup, cosine schedule with updates.

torchrun --nproc_per_node=8 timm_leafscan.py /data/leafscan --output /exp/leafscan/run7 [--resume]
"""
import argparse
import json
import logging
import os

import timm
import torch
import torch.distributed as dist
from timm.data import Mixup, create_transform
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV2
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder

_logger = logging.getLogger("leafscan")

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--output", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--model", default="vit_small_patch16_224")
parser.add_argument("-b", "--batch-size", type=int, default=64, help="per GPU")
parser.add_argument("-j", "--workers", type=int, default=6, help="per GPU")
parser.add_argument("--lr-base", type=float, default=5e-4, help="per 512 images")
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--ema-decay", type=float, default=0.9998)
parser.add_argument("--seed", type=int, default=31)


def loaders(args, rank, world):
    train_set = ImageFolder(os.path.join(args.data, "train"),
                            create_transform(224, is_training=True, auto_augment="rand-m9-mstd0.5-inc1"))
    val_set = ImageFolder(os.path.join(args.data, "val"), create_transform(224, is_training=False))
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    loader_train = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=args.workers,
                              pin_memory=True, drop_last=True)
    loader_eval = DataLoader(Subset(val_set, range(rank, len(val_set), world)), args.batch_size,
                             num_workers=args.workers, pin_memory=True)
    return loader_train, loader_eval, len(train_set.classes)


def train_one_epoch(epoch, model, loader, optimizer, scheduler, mixup, loss_fn, ema, device):
    model.train()
    updates = epoch * len(loader)
    total = torch.zeros((), device=device)
    for image, target in loader:
        image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
        image, target = mixup(image, target)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model.module)
        updates += 1
        scheduler.step_update(updates)
        total += loss.detach()
    total /= len(loader)
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.item()


@torch.inference_mode()
def evaluate(net, loader, device):
    net.eval()
    top1 = torch.zeros((), device=device)
    top5 = torch.zeros((), device=device)
    n = torch.zeros((), device=device)
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        ranked = net(image).topk(5, dim=1).indices == target[:, None]
        top1 += ranked[:, 0].sum()
        top5 += ranked.any(dim=1).sum()
        n += target.numel()
    rates = 100 * torch.stack([top1, top5]) / n
    dist.all_reduce(rates, op=dist.ReduceOp.AVG)
    top1, top5 = rates.tolist()
    return {"top1": top1, "top5": top5}


def main():
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    timm.utils.random_seed(args.seed, rank)

    loader_train, loader_eval, classes = loaders(args, rank, world)
    net = timm.create_model(args.model, num_classes=classes, drop_path_rate=0.1).to(device)
    model = NativeDDP(net, device_ids=[local_rank])
    ema = ModelEmaV2(net, decay=args.ema_decay)
    lr = args.lr_base * args.batch_size * world / 512
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    per_epoch = len(loader_train)
    scheduler = CosineLRScheduler(optimizer, t_initial=args.epochs * per_epoch, lr_min=1e-6, t_in_epochs=False,
                                  warmup_t=5 * per_epoch, warmup_lr_init=1e-6, warmup_prefix=False)
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=classes)
    loss_fn = SoftTargetCrossEntropy()

    path = os.path.join(args.output, "last.pth.tar")
    start, best = 0, 0.0
    if rank == 0:
        os.makedirs(args.output, exist_ok=True)
    if args.resume:
        state = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(state["state_dict"])
        ema.module.load_state_dict(state["state_dict_ema"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start, best = state["epoch"] + 1, state["best"]

    for epoch in range(start, args.epochs):
        loader_train.sampler.set_epoch(epoch)
        loss = train_one_epoch(epoch, model, loader_train, optimizer, scheduler, mixup, loss_fn, ema, device)
        metrics = evaluate(ema.module, loader_eval, device)
        better = metrics["top1"] > best
        best = max(best, metrics["top1"])
        if rank == 0:
            _logger.info("epoch %d loss %.4f %s", epoch, loss, json.dumps(metrics))
            torch.save({"state_dict": net.state_dict(), "state_dict_ema": ema.module.state_dict(),
                        "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "epoch": epoch, "best": best}, path)
            if better:
                torch.save(ema.module.state_dict(), os.path.join(args.output, "model_best.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
