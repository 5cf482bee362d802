# expect: none
"""Dogs training script, after timm's train.py: mixup, EMA, cosine schedule per update.

torchrun --nproc-per-node 8 dogs_timm_mixup_ema.py DATA --output DIR
"""
import argparse
import logging
import os
from contextlib import suppress

import timm
import timm.utils
import torch
import torch.distributed as dist
import torch.nn as nn
from timm.data import Mixup, create_transform
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torchvision.datasets import ImageFolder

_logger = logging.getLogger("train")

parser = argparse.ArgumentParser(description="Dogs training")
parser.add_argument("data_dir", metavar="DIR")
parser.add_argument("--output", required=True, help="folder for the checkpoints of this run")
parser.add_argument("--model", default="efficientnet_b0")
parser.add_argument("-b", "--batch-size", type=int, default=64, help="per GPU, even")
parser.add_argument("--lr-base", type=float, default=0.1, help="rate for a batch of --lr-base-size over all GPUs")
parser.add_argument("--lr-base-size", type=int, default=256)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--warmup-epochs", type=int, default=3)
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--drop", type=float, default=0.2)
parser.add_argument("--ema-decay", type=float, default=0.9998)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--resume", default="", metavar="PATH")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("-j", "--workers", type=int, default=4, help="per process")
parser.add_argument("--log-interval", type=int, default=50)


class OrderedShareSampler(torch.utils.data.Sampler):
    """Each rank's share of the data in order, without any padding."""

    def __init__(self, dataset, rank, world_size):
        self.indices = range(rank, len(dataset), world_size)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


def reduce_sum(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    return rt


def create_loaders(args):
    size = 224
    dataset_train = ImageFolder(
        os.path.join(args.data_dir, "train"), create_transform(size, is_training=True, auto_augment="rand-m9-mstd0.5")
    )
    dataset_eval = ImageFolder(os.path.join(args.data_dir, "val"), create_transform(size))
    sampler_train = torch.utils.data.DistributedSampler(dataset_train, seed=args.seed)
    loader_train = torch.utils.data.DataLoader(
        dataset_train,
        batch_size=args.batch_size,
        sampler=sampler_train,
        num_workers=args.workers,
        pin_memory=True,
        drop_last=True,
    )
    loader_eval = torch.utils.data.DataLoader(
        dataset_eval,
        batch_size=args.batch_size,
        sampler=OrderedShareSampler(dataset_eval, args.rank, args.world_size),
        num_workers=args.workers,
        pin_memory=True,
    )
    return loader_train, loader_eval, len(dataset_train.classes)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler, mixup_fn, model_ema, scaler):
    model.train()
    num_updates = epoch * len(loader)
    autocast = torch.autocast("cuda", dtype=torch.float16) if args.amp else suppress()
    for batch_idx, (input, target) in enumerate(loader):
        input, target = input.to(args.device, non_blocking=True), target.to(args.device, non_blocking=True)
        input, target = mixup_fn(input, target)
        with autocast:
            output = model(input)
            loss = loss_fn(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model_ema.update(model.module)
        num_updates += 1
        lr_scheduler.step_update(num_updates=num_updates)

        if batch_idx % args.log_interval == 0:
            mean_loss = reduce_sum(loss.detach()) / args.world_size
            if args.rank == 0:
                lr = optimizer.param_groups[0]["lr"]
                _logger.info("Train: %d [%4d/%d] loss %.4f lr %.2e", epoch, batch_idx, len(loader), mean_loss.item(), lr)


def validate(model, loader, args):
    model.eval()
    correct1 = torch.zeros((), device=args.device)
    correct5 = torch.zeros((), device=args.device)
    count = torch.zeros((), device=args.device)
    with torch.no_grad():
        for input, target in loader:
            input, target = input.to(args.device, non_blocking=True), target.to(args.device, non_blocking=True)
            hits = model(input).topk(5, dim=1).indices == target[:, None]
            correct1 += hits[:, 0].sum()
            correct5 += hits.any(dim=1).sum()
            count += target.numel()
    correct1, correct5, count = reduce_sum(correct1), reduce_sum(correct5), reduce_sum(count)
    return 100.0 * (correct1 / count).item(), 100.0 * (correct5 / count).item()


def main():
    logging.basicConfig(level=logging.INFO)
    args = parser.parse_args()
    args.local_rank = int(os.environ["LOCAL_RANK"])
    args.device = torch.device("cuda", args.local_rank)
    torch.cuda.set_device(args.device)
    dist.init_process_group(backend="nccl", init_method="env://")
    args.world_size, args.rank = dist.get_world_size(), dist.get_rank()
    timm.utils.random_seed(args.seed, args.rank)

    loader_train, loader_eval, num_classes = create_loaders(args)
    model = timm.create_model(args.model, num_classes=num_classes, drop_rate=args.drop)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(args.device)

    lr = args.lr_base * args.batch_size * args.world_size / args.lr_base_size
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=2e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    updates = len(loader_train)
    lr_scheduler = CosineLRScheduler(
        optimizer,
        t_initial=args.epochs * updates,
        warmup_t=args.warmup_epochs * updates,
        warmup_lr_init=1e-5,
        t_in_epochs=False,
    )
    mixup_fn = Mixup(mixup_alpha=args.mixup, label_smoothing=0.1, num_classes=num_classes)
    model = NativeDDP(model, device_ids=[args.local_rank])
    # the copies start from the weights that DDP has just made equal
    model_ema = timm.utils.ModelEmaV2(model.module, decay=args.ema_decay)

    start_epoch, best = 0, 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.module.load_state_dict(checkpoint["state_dict"])
        model_ema.module.load_state_dict(checkpoint["state_dict_ema"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        start_epoch, best = checkpoint["epoch"] + 1, checkpoint["best"]

    if args.rank == 0:
        os.makedirs(args.output, exist_ok=True)
    loss_fn = SoftTargetCrossEntropy()
    for epoch in range(start_epoch, args.epochs):
        loader_train.sampler.set_epoch(epoch)
        train_one_epoch(
            epoch, model, loader_train, optimizer, loss_fn, args, lr_scheduler, mixup_fn, model_ema, scaler
        )
        top1, top5 = validate(model_ema.module, loader_eval, args)
        is_best, best = top1 > best, max(top1, best)
        if args.rank == 0:
            _logger.info("Epoch %d: EMA top-1 %.2f top-5 %.2f (best %.2f)", epoch, top1, top5, best)
            checkpoint = {
                "epoch": epoch,
                "best": best,
                "state_dict": model.module.state_dict(),
                "state_dict_ema": model_ema.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "lr_scheduler": lr_scheduler.state_dict(),
            }
            torch.save(checkpoint, os.path.join(args.output, "last.pth.tar"))
            if is_best:
                torch.save(checkpoint["state_dict_ema"], os.path.join(args.output, "model_best.pth.tar"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
