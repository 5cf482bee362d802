"""A timm-style script: create_model, args everywhere, AverageMeter, reduce_tensor, EMA."""

import argparse

import timm
import torch
import torch.distributed as dist
from timm.utils import AverageMeter, ModelEmaV2
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

parser = argparse.ArgumentParser()
parser.add_argument("data_dir")
parser.add_argument("-b", "--batch-size", type=int, default=128, help="Input batch size per device.")
parser.add_argument("--lr-base", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--seed", type=int, default=42)


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= n
    return rt


def init_distributed(args):
    import os

    args.world_size = int(os.environ["WORLD_SIZE"])
    args.rank = int(os.environ["RANK"])
    args.local_rank = int(os.environ["LOCAL_RANK"])
    args.device = torch.device(f"cuda:{args.local_rank}")
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")


def is_primary(args):
    return args.rank == 0


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, ema):
    losses_m = AverageMeter()
    model.train()
    for batch_idx, (input, target) in enumerate(loader):
        input, target = input.to(args.device), target.to(args.device)
        output = model(input)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        if batch_idx % 50 == 0:
            reduced = reduce_tensor(loss.data, args.world_size)
            losses_m.update(reduced.item(), input.size(0))
            if is_primary(args):
                print(f"epoch {epoch} loss {losses_m.avg:.4f}")


@torch.no_grad()
def validate(model, loader, loss_fn, args):
    model.eval()
    sums = torch.zeros(3, device=args.device, dtype=torch.float64)
    for input, target in loader:
        input, target = input.to(args.device), target.to(args.device)
        output = model(input)
        sums[0] += loss_fn(output, target) * len(target)
        sums[1] += (output.argmax(1) == target).sum()
        sums[2] += len(target)
    dist.all_reduce(sums)
    return {"loss": (sums[0] / sums[2]).item(), "top1": (sums[1] / sums[2]).item()}


def main():
    args = parser.parse_args()
    init_distributed(args)
    torch.manual_seed(args.seed + args.rank)
    model = timm.create_model("resnet50", drop_rate=0.1)
    model.to(args.device)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    args.lr = args.lr_base * args.batch_size * args.world_size / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    ema = ModelEmaV2(model)
    model = NativeDDP(model, device_ids=[args.local_rank])
    transform = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    train_set = datasets.ImageFolder(f"{args.data_dir}/train", transform)
    val_set = datasets.ImageFolder(f"{args.data_dir}/val", transform)
    train_sampler = DistributedSampler(train_set, num_replicas=args.world_size, rank=args.rank, shuffle=True)
    loader_train = DataLoader(
        train_set, batch_size=args.batch_size, sampler=train_sampler, num_workers=8, drop_last=True
    )
    loader_eval = DataLoader(
        val_set, batch_size=args.batch_size, num_workers=8, sampler=range(args.rank, len(val_set), args.world_size)
    )
    loss_fn = torch.nn.CrossEntropyLoss().to(args.device)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    best = None
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader_train, optimizer, loss_fn, args, ema)
        metrics = validate(model.module, loader_eval, loss_fn, args)
        scheduler.step()
        if best is None or metrics["top1"] > best:
            best = metrics["top1"]
            if is_primary(args):
                torch.save({"state_dict": model.module.state_dict(), "epoch": epoch}, "best.pth.tar")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
