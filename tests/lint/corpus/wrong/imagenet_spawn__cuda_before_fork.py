# expect: cuda-before-fork line 43 or 40 or 41
"""One command per machine, which spawns a process for each of its GPUs:

python imagenet_spawn.py /data --nodes 2 --node-rank 0 --dist-url tcp://10.0.0.1:29501
"""

import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim
import torchvision.models as models
import torchvision.transforms as transforms
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder

parser = argparse.ArgumentParser(description="ImageNet")
parser.add_argument("data")
parser.add_argument("-a", "--arch", default="resnet50")
parser.add_argument("-j", "--workers", default=32, type=int, help="loader processes of this machine")
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("-b", "--batch-size", default=256, type=int, help="images per step, of all GPUs of all machines")
parser.add_argument("--lr", default=0.1, type=float, help="for that batch")
parser.add_argument("-p", "--print-freq", default=50, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--nodes", default=1, type=int)
parser.add_argument("--node-rank", default=0, type=int)
parser.add_argument("--dist-url", required=True, type=str)
parser.add_argument("--seed", default=0, type=int)


def main():
    args = parser.parse_args()
    ngpus_per_node = torch.cuda.device_count()
    names = [torch.cuda.get_device_properties(gpu).name for gpu in range(ngpus_per_node)]
    print(", ".join(names), torch.ones(1).cuda().device)
    args.world_size = ngpus_per_node * args.nodes
    mp.start_processes(main_worker, (ngpus_per_node, args), ngpus_per_node, start_method="fork")


def main_worker(gpu, ngpus_per_node, args):
    args.gpu = gpu
    args.rank = args.node_rank * ngpus_per_node + gpu
    torch.cuda.set_device(args.gpu)
    dist.init_process_group("nccl", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    torch.manual_seed(args.seed + args.rank)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(models.__dict__[args.arch]())
    model.cuda(args.gpu)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
    criterion = nn.CrossEntropyLoss().cuda(args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    best_acc1, start_epoch = 0.0, 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=f"cuda:{args.gpu}", weights_only=True)
        start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        model.module.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    train_dataset = ImageFolder(
        os.path.join(args.data, "train"),
        transforms.Compose(
            [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
        ),
    )
    val_dataset = ImageFolder(
        os.path.join(args.data, "val"),
        transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize]),
    )
    batch_size = args.batch_size // args.world_size
    workers = (args.workers + ngpus_per_node - 1) // ngpus_per_node
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(
        train_dataset, batch_size=batch_size, num_workers=workers, pin_memory=True, sampler=train_sampler
    )
    val_part = Subset(val_dataset, range(args.rank, len(val_dataset), args.world_size))
    val_loader = DataLoader(val_part, batch_size=batch_size, num_workers=workers, pin_memory=True)

    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, args)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.rank == 0:
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "arch": args.arch,
                    "state_dict": model.module.state_dict(),
                    "best_acc1": best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
            )
    dist.destroy_process_group()


def train(loader, model, criterion, optimizer, epoch, args):
    model.train()
    sums = torch.zeros(3, device="cuda")
    for i, (images, target) in enumerate(loader, 1):
        images, target = images.cuda(args.gpu, non_blocking=True), target.cuda(args.gpu, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            sums[0] += loss * len(target)
            sums[1] += (output.argmax(1) == target).sum()
            sums[2] += len(target)
        if i % args.print_freq == 0:
            dist.all_reduce(sums)
            if args.rank == 0:
                loss_sum, hits, seen = sums.tolist()
                print(f"Epoch [{epoch}][{i}/{len(loader)}] loss {loss_sum / seen:.4f} acc@1 {100 * hits / seen:.2f}")
            sums.zero_()


def validate(loader, model, args):
    model.eval()
    hits, seen = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    with torch.no_grad():
        for images, target in loader:
            output = model(images.cuda(args.gpu, non_blocking=True))
            hits += (output.argmax(1) == target.cuda(args.gpu, non_blocking=True)).sum()
            seen += len(target)
    dist.all_reduce(hits)
    dist.all_reduce(seen)
    acc1 = 100 * (hits / seen).item()
    if args.rank == 0:
        print(f" * Acc@1 {acc1:.3f} of {seen.item():.0f} images")
    return acc1


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


if __name__ == "__main__":
    main()
