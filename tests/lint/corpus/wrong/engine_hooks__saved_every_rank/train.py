# expect: none
import argparse
import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import v2

from core import Loop
from hooks import EpochShuffle, Console, Snapshots


def get_args():
    ap = argparse.ArgumentParser("product photo classifier")
    ap.add_argument("data")
    ap.add_argument("--output", default="runs/products")
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--batch", type=int, default=512, help="images per step over all GPUs together")
    ap.add_argument("--lr", type=float, default=0.2, help="for --batch images per step")
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--workers", type=int, default=6, help="per GPU")
    return ap.parse_args()


def transform(train):
    head = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()] if train else [v2.Resize(256), v2.CenterCrop(224)]
    return v2.Compose([v2.ToImage(), *head, v2.ToDtype(torch.float32, scale=True),
                       v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.manual_seed(args.seed + 1000 * rank)
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} does not split over {world} GPUs")
    share = args.batch // world

    train_set = torchvision.datasets.ImageFolder(os.path.join(args.data, "train"), transform(True))
    valid_set = torchvision.datasets.ImageFolder(os.path.join(args.data, "valid"), transform(False))
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_dl = DataLoader(train_set, share, sampler=sampler, num_workers=args.workers,
                          pin_memory=True, drop_last=True)
    valid_dl = DataLoader(Subset(valid_set, range(rank, len(valid_set), world)), share,
                          num_workers=args.workers, pin_memory=True)

    model = torchvision.models.efficientnet_b0(num_classes=len(train_set.classes)).cuda(gpu)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DDP(model, device_ids=[gpu])
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-5)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=args.epochs * len(train_dl))

    loop = Loop(model, opt, sched, train_dl, valid_dl, args.epochs)
    loop.register(EpochShuffle(sampler))
    loop.register(Console())
    loop.register(Snapshots(args.output))
    loop.run()


if __name__ == "__main__":
    dist.init_process_group(backend="nccl")
    try:
        run(get_args())
    finally:
        dist.destroy_process_group()
