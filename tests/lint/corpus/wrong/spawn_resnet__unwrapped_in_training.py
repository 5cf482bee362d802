# expect: unwrapped-in-training line 67
import argparse
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torchvision
import torchvision.transforms as transforms
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def setup(rank, world_size, port):
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)


def cleanup():
    dist.destroy_process_group()


def get_dataset(train):
    steps = [transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))]
    if train:
        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] + steps
    return torchvision.datasets.CIFAR10("./data", train=train, transform=transforms.Compose(steps))


def evaluate(model, rank, world_size):
    """Each process takes every world_size-th image; nothing is padded."""
    test_set = get_dataset(train=False)
    part = torch.utils.data.Subset(test_set, list(range(rank, len(test_set), world_size)))
    model.eval()
    correct = torch.zeros(1, device=rank)
    with torch.no_grad():
        for x, y in DataLoader(part, batch_size=500):
            correct += (model(x.to(rank)).argmax(1) == y.to(rank)).sum()
    dist.all_reduce(correct, op=dist.ReduceOp.SUM)
    return correct.item() / len(test_set)


def run(rank, world_size, port, args):
    setup(rank, world_size, port)
    torch.manual_seed(args.seed + rank)
    dataset = get_dataset(train=True)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size // world_size, sampler=sampler, num_workers=args.workers)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(torchvision.models.resnet18(num_classes=10))
    model = DDP(model.to(rank), device_ids=[rank])
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model.module(x.to(rank)), y.to(rank))
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), args.output)
    cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=128, help="total batch of all GPUs")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=2, help="per GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="resnet18.pt")
    args = parser.parse_args()
    torchvision.datasets.CIFAR10("./data", download=True)  # once, before there are several processes
    world_size = torch.cuda.device_count()
    mp.spawn(run, args=(world_size, free_port(), args), nprocs=world_size, join=True)
