# expect: none
"""Herbarium sheets with timm models and utilities (torchrun timm_herbarium.py DIR)."""
import argparse
import logging
import os

import timm
import torch
import torch.distributed as dist
from timm.data import Mixup, create_transform, resolve_data_config
from timm.layers import convert_sync_batchnorm
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV2, setup_default_logging
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder

_logger = logging.getLogger("herbarium")

ap = argparse.ArgumentParser()
ap.add_argument("dir")
ap.add_argument("--model", default="resnext50_32x4d")
ap.add_argument("--epochs", type=int, default=80)
ap.add_argument("-b", "--batch-size", type=int, default=64, help="per GPU")
ap.add_argument("--lr-base", type=float, default=0.1, help="rate for a step of --lr-base-size images")
ap.add_argument("--lr-base-size", type=int, default=256)
ap.add_argument("-j", "--workers", type=int, default=6, help="per GPU")
ap.add_argument("--ema-decay", type=float, default=0.9998)
ap.add_argument("--seed", type=int, default=42)
ap.add_argument("--output", default="output/herbarium")
ap.add_argument("--resume", default="")


def train_one_epoch(epoch, model, ema, loader, mixup, loss_fn, optimizer, scheduler, device):
    model.train()
    updates = epoch * len(loader)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        x, y = mixup(x, y)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        updates += 1
        scheduler.step_update(num_updates=updates)


def validate(net, loader, device):
    net.eval()
    counts = torch.zeros(3, device=device)
    with torch.inference_mode():
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            top = net(x).topk(5, dim=1).indices == y[:, None]
            counts += torch.stack([top[:, 0].sum(), top.any(1).sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(counts)
    top1, top5, n = counts.tolist()
    return 100 * top1 / n, 100 * top5 / n


def main():
    setup_default_logging()
    args = ap.parse_args()
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local}")
    torch.cuda.set_device(device)
    timm.utils.random_seed(args.seed, rank)

    lr = args.lr_base * args.batch_size * world / args.lr_base_size
    train_root, val_root = os.path.join(args.dir, "train"), os.path.join(args.dir, "val")
    classes = len([e for e in os.scandir(train_root) if e.is_dir()])
    model = timm.create_model(args.model, num_classes=classes, drop_rate=0.1)
    data_config = resolve_data_config({}, model=model)
    train_ds = ImageFolder(train_root, create_transform(**data_config, is_training=True))
    val_ds = ImageFolder(val_root, create_transform(**data_config))

    model = convert_sync_batchnorm(model).to(device)
    ema = ModelEmaV2(model, decay=args.ema_decay)
    model = NativeDDP(model, device_ids=[local])
    optimizer = create_optimizer_v2(model, opt="sgd", lr=lr, weight_decay=2e-5, momentum=0.9)

    train_sampler = DistributedSampler(train_ds, seed=args.seed)
    train_loader = DataLoader(train_ds, args.batch_size, sampler=train_sampler, num_workers=args.workers,
                              pin_memory=True, drop_last=True)
    val_loader = DataLoader(Subset(val_ds, range(rank, len(val_ds), world)), args.batch_size,
                            num_workers=args.workers, pin_memory=True)
    scheduler = CosineLRScheduler(optimizer, t_initial=args.epochs * len(train_loader), t_in_epochs=False,
                                  warmup_t=3 * len(train_loader), warmup_lr_init=1e-5)
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=classes, label_smoothing=0.1)
    loss_fn = SoftTargetCrossEntropy()

    start, best = 0, 0.0
    if args.resume:
        saved = torch.load(args.resume, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["state_dict"])
        ema.module.load_state_dict(saved["state_dict_ema"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["lr_scheduler"])
        start, best = saved["epoch"] + 1, saved["best"]
    else:
        # the average starts from the weights that the wrapper took from rank 0
        ema.set(model.module)

    for epoch in range(start, args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, ema, train_loader, mixup, loss_fn, optimizer, scheduler, device)
        top1, top5 = validate(ema.module, val_loader, device)
        if rank == 0:
            _logger.info("epoch %d: top1 %.2f top5 %.2f", epoch, top1, top5)
            improved = top1 > best
            best = max(best, top1)
            os.makedirs(args.output, exist_ok=True)
            state = dict(state_dict=model.module.state_dict(), state_dict_ema=ema.module.state_dict(),
                         optimizer=optimizer.state_dict(), lr_scheduler=scheduler.state_dict(),
                         epoch=epoch, best=best)
            torch.save(state, os.path.join(args.output, "last.pth.tar"))
            if improved:
                torch.save(state["state_dict_ema"], os.path.join(args.output, "best.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
