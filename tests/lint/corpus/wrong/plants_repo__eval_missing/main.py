# expect: none
"""Plant disease classification, multi-GPU.

    torchrun --nproc_per_node 4 main.py --root DATA --exp runs/NAME
"""
import argparse
import os

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import convnext_tiny

import data
import engine
import utils


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, help="image folder, one sub-folder for each class")
    parser.add_argument("--exp", required=True, help="folder of the experiment")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=2, help="epochs")
    parser.add_argument("--batch", type=int, default=32, help="images of each process")
    parser.add_argument("--lr", type=float, default=1e-4, help="for one process; multiplied by their number")
    parser.add_argument("--val-share", type=float, default=0.15)
    parser.add_argument("--workers", type=int, default=6, help="of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def make_optimizer(model, args, steps_per_epoch):
    lr = args.lr * utils.world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=args.warmup * steps_per_epoch)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, (args.epochs - args.warmup) * steps_per_epoch)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [args.warmup * steps_per_epoch])
    return optimizer, schedule


def main():
    args = parse()
    device = utils.setup()
    utils.seed_process(args.seed)
    os.makedirs(args.exp, exist_ok=True)

    train_loader, val_loader, classes = data.loaders(args)
    net = convnext_tiny(num_classes=len(classes), stochastic_depth_prob=0.1).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index])
    optimizer, schedule = make_optimizer(model, args, len(train_loader))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    saver = utils.Checkpoints(args.exp, model, optimizer, schedule)
    start = saver.restore() if args.resume else 0

    for epoch in range(start, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        train_loss = engine.train(model, train_loader, criterion, optimizer, schedule, device)
        val_loss, val_acc = engine.evaluate(model, val_loader, criterion, device)
        utils.log(f"{epoch:3d} | train {train_loss:.4f} | val {val_loss:.4f} | acc {val_acc:.2%}")
        saver.save(epoch, val_acc)
    utils.log(f"best accuracy {saver.best:.2%}")
    utils.teardown()


if __name__ == "__main__":
    main()
