# expect: none
"""EuroSAT land use.  torchrun --nproc-per-node=2 run.py --folder runs/a [--resume]"""
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import regnet_y_400mf

from checkpoints import Checkpoints
from eurosat import make_loaders


def train(net, batches, optimizer, scaler, device):
    net.train()
    for x, y in batches:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test(net, batches, device):
    net.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for x, y in batches:
            x, y = x.to(device), y.to(device)
            out = net(x)
            sums[0] += F.cross_entropy(out, y, reduction="sum")
            sums[1] += (out.argmax(1) == y).sum()
            sums[2] += len(x)
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return loss / count, right / count


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--folder", required=True, help="of this run, on a file system that all machines see")
    cli.add_argument("--data", default="data", help="a folder on the machine's own disk")
    cli.add_argument("--resume", action="store_true")
    cli.add_argument("--epochs", type=int, default=50)
    cli.add_argument("--batch", type=int, default=64, help="per process")
    cli.add_argument("--lr", type=float, default=0.05, help="per process, summed over the processes")
    args = cli.parse_args()

    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)

    train_batches, test_batches = make_loaders(args, rank, world)
    net = regnet_y_400mf(num_classes=10)
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    ddp = DistributedDataParallel(net, device_ids=[local])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr * world, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.2)
    scaler = torch.amp.GradScaler("cuda")
    files = Checkpoints(args.folder, rank, device, net=net, optimizer=optimizer, scheduler=scheduler, scaler=scaler)

    best = 0.0
    if args.resume:
        best = files.restore()
    for epoch in range(args.epochs):
        train_batches.sampler.set_epoch(epoch)
        train(ddp, train_batches, optimizer, scaler, device)
        scheduler.step()
        loss, accuracy = test(net, test_batches, device)
        better = accuracy > best
        best = max(best, accuracy)
        files.store(best, better)
        if rank == 0:
            print(f"after epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.4f}, best {best:.4f}")

    files.restore_best()
    loss, accuracy = test(net, test_batches, device)
    if rank == 0:
        print(f"best weights: loss {loss:.4f}, accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
