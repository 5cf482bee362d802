# expect: none
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision import datasets, models

from data import get_loaders
from engine import evaluate, train_one_epoch


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(rank)

    if local_rank == 0:
        datasets.CIFAR100(args.data, download=True)
    dist.barrier()
    train_loader, test_loader, sampler = get_loaders(args.data, args.batch, rank, world_size)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(models.mobilenet_v3_small(num_classes=100)).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, optimizer, device)
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(f"{epoch:3d} loss {loss:.4f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data")
    parser.add_argument("--batch", type=int, default=256, help="on all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=50)
    main(parser.parse_args())
