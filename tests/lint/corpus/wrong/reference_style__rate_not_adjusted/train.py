# expect: rate-not-adjusted line 85 or 70 or 71
import argparse
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torchvision.transforms import v2

import utils


def train_one_epoch(model, criterion, optimizer, loader, device, epoch, args, scaler):
    model.train()
    logger = utils.MetricLogger()
    for image, target in logger.log_every(loader, args.print_freq, f"epoch {epoch}"):
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if args.clip_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if args.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
        logger.update(n=image.shape[0], loss=loss)
    return logger.means(device)


def evaluate(model, loader, device):
    model.eval()
    logger = utils.MetricLogger()
    with torch.inference_mode():
        for image, target in loader:
            target = target.to(device)
            hit = (model(image.to(device)).argmax(1) == target).float().mean()
            logger.update(n=target.shape[0], acc1=hit)
    return logger.means(device)["acc1"]


def load_data(args):
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    train = torchvision.datasets.ImageFolder(
        os.path.join(args.data_path, "train"), v2.Compose([v2.RandomResizedCrop(224), *to_tensor])
    )
    val = torchvision.datasets.ImageFolder(
        os.path.join(args.data_path, "val"), v2.Compose([v2.Resize(256), v2.CenterCrop(224), *to_tensor])
    )
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train)
        val = torch.utils.data.Subset(val, range(dist.get_rank(), len(val), dist.get_world_size()))
    else:
        train_sampler = torch.utils.data.RandomSampler(train)
    return train, val, train_sampler


def main(args):
    utils.init_distributed_mode(args)
    device = torch.device("cuda")
    torch.manual_seed(args.seed + (dist.get_rank() if args.distributed else 0))
    train_set, val_set, train_sampler = load_data(args)
    train_loader = torch.utils.data.DataLoader(
        train_set, batch_size=args.batch_size, sampler=train_sampler, num_workers=args.workers, pin_memory=True
    )
    val_loader = torch.utils.data.DataLoader(val_set, batch_size=args.batch_size, num_workers=args.workers)

    model = torchvision.models.get_model(args.model, num_classes=len(train_set.classes))
    if args.distributed:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(device)
    model_without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        model_without_ddp = model.module

    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        start_epoch = checkpoint["epoch"] + 1
        if scaler:
            scaler.load_state_dict(checkpoint["scaler"])
    epochs = range(start_epoch, args.epochs)
    if args.test_only:
        accuracy, epochs = evaluate(model, val_loader, device), ()
        if utils.is_main_process():
            print(f"top-1 {accuracy:.4f}")

    for epoch in epochs:
        if args.distributed:
            train_sampler.set_epoch(epoch)
        stats = train_one_epoch(model, criterion, optimizer, train_loader, device, epoch, args, scaler)
        lr_scheduler.step()
        accuracy = evaluate(model, val_loader, device)
        if utils.is_main_process():
            print(f"epoch {epoch}: loss {stats['loss']:.4f}, top-1 {accuracy:.4f}")
        checkpoint = {
            "model": model_without_ddp.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
        }
        if scaler:
            checkpoint["scaler"] = scaler.state_dict()
        utils.save_on_master(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path", default="/data/imagenet")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("-b", "--batch-size", default=32, type=int, help="images per GPU")
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("-j", "--workers", default=8, type=int, help="per GPU")
    parser.add_argument("--lr", default=0.0125, type=float, help="per GPU of 32 images")
    parser.add_argument("--clip-grad-norm", default=None, type=float)
    parser.add_argument("--print-freq", default=50, type=int)
    parser.add_argument("--output-dir", default=".")
    parser.add_argument("--resume", default="")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--test-only", action="store_true")
    parser.add_argument("--amp", action="store_true")
    main(parser.parse_args())
