# expect: load-without-map-location line 120
import argparse
import os
from contextlib import suppress

import timm
import timm.utils
import torch
import torch.distributed as dist
import torch.nn as nn
from timm.data import create_transform
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torchvision.datasets import ImageFolder

parser = argparse.ArgumentParser(description="Training")
parser.add_argument("data_dir")
parser.add_argument("--model", default="resnet50")
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("-b", "--batch-size", type=int, default=128, help="per process")
parser.add_argument("--lr-base", type=float, default=0.1)
parser.add_argument("--lr-base-size", type=int, default=256, help="the global batch that lr-base is for")
parser.add_argument("-j", "--workers", type=int, default=4, help="per process")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=50)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--resume", default="")
parser.add_argument("--output", default="output")


def setup(args):
    args.rank, args.world_size, args.local_rank, args.distributed = 0, 1, 0, "WORLD_SIZE" in os.environ
    if args.distributed:
        args.local_rank = int(os.environ["LOCAL_RANK"])
        dist.init_process_group(backend="nccl", init_method="env://")
        args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    args.device = torch.device("cuda", args.local_rank)
    torch.cuda.set_device(args.device)


def create_loaders(args, input_size):
    train_set = ImageFolder(f"{args.data_dir}/train", create_transform(input_size, is_training=True))
    eval_set = ImageFolder(f"{args.data_dir}/val", create_transform(input_size, is_training=False))
    classes = len(train_set.classes)
    sampler = None
    if args.distributed:
        sampler = torch.utils.data.distributed.DistributedSampler(train_set, args.world_size, args.rank)
        eval_set = torch.utils.data.Subset(eval_set, range(args.rank, len(eval_set), args.world_size))
    train_loader = torch.utils.data.DataLoader(
        train_set,
        batch_size=args.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=True,
        drop_last=True,
    )
    eval_loader = torch.utils.data.DataLoader(eval_set, batch_size=args.batch_size, num_workers=args.workers)
    return train_loader, eval_loader, classes


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, amp_autocast, loss_scaler, scheduler):
    model.train()
    losses = timm.utils.AverageMeter()
    for batch_idx, (input, target) in enumerate(loader):
        input, target = input.to(args.device, non_blocking=True), target.to(args.device, non_blocking=True)
        with amp_autocast():
            loss = loss_fn(model(input), target)
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step_update(num_updates=epoch * len(loader) + batch_idx + 1)
        if batch_idx % args.log_interval == 0:
            reduced = timm.utils.reduce_tensor(loss.detach(), args.world_size) if args.distributed else loss.detach()
            losses.update(reduced.item(), input.size(0))
            if args.rank == 0:
                print(f"Train: {epoch} [{batch_idx}/{len(loader)}] loss {losses.val:.4f} ({losses.avg:.4f})")


@torch.no_grad()
def validate(model, loader, args, amp_autocast):
    model.eval()
    counts = torch.zeros(2, device=args.device)
    for input, target in loader:
        target = target.to(args.device)
        with amp_autocast():
            output = model(input.to(args.device))
        counts[0] += (output.argmax(1) == target).sum()
        counts[1] += target.size(0)
    if args.distributed:
        dist.all_reduce(counts)
    return 100 * (counts[0] / counts[1]).item()


def main():
    args = parser.parse_args()
    setup(args)
    timm.utils.random_seed(args.seed, args.rank)  # seed + rank
    model = timm.create_model(args.model, pretrained=False)
    input_size = model.default_cfg["input_size"]
    train_loader, eval_loader, classes = create_loaders(args, input_size)
    model.reset_classifier(classes)
    if args.distributed:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(args.device)
    args.lr = args.lr_base * args.batch_size * args.world_size / args.lr_base_size
    optimizer = create_optimizer_v2(model, opt="sgd", lr=args.lr, weight_decay=1e-4, momentum=0.9)
    updates = len(train_loader)
    scheduler = CosineLRScheduler(optimizer, t_initial=args.epochs * updates, t_in_epochs=False)
    amp_autocast = (lambda: torch.autocast("cuda")) if args.amp else suppress
    loss_scaler = timm.utils.NativeScaler() if args.amp else None
    start_epoch, best = 0, 0.0
    if args.resume:
        state = torch.load(args.resume, weights_only=True)
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])
        if loss_scaler is not None:
            loss_scaler.load_state_dict(state["amp_scaler"])
        start_epoch, best = state["epoch"] + 1, state["metric"]
        scheduler.step_update(start_epoch * updates)  # a function of the number of updates alone
    if args.distributed:
        model = NativeDDP(model, device_ids=[args.local_rank])
    loss_fn = LabelSmoothingCrossEntropy(0.1).to(args.device)

    for epoch in range(start_epoch, args.epochs):
        if hasattr(train_loader.sampler, "set_epoch"):
            train_loader.sampler.set_epoch(epoch)
        train_one_epoch(
            epoch, model, train_loader, optimizer, loss_fn, args, amp_autocast, loss_scaler, scheduler
        )
        top1 = validate(model, eval_loader, args, amp_autocast)
        if args.rank == 0:
            os.makedirs(args.output, exist_ok=True)
            state = {
                "epoch": epoch,
                "state_dict": timm.utils.unwrap_model(model).state_dict(),
                "optimizer": optimizer.state_dict(),
                "metric": max(best, top1),
            }
            if loss_scaler is not None:
                state["amp_scaler"] = loss_scaler.state_dict()
            torch.save(state, f"{args.output}/last.pth.tar")
            if top1 > best:
                torch.save(state, f"{args.output}/model_best.pth.tar")
            print(f"Epoch {epoch}: top-1 {top1:.2f}, best {max(best, top1):.2f}")
        best = max(best, top1)
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
