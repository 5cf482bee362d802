# expect: fixed-port line 20
import os
import random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.transforms import v2
from tqdm import tqdm

SEED = 2023


def prepare(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "9998"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    torch.manual_seed(SEED + rank)


def get_dataset(rank, train, portion=1.0):
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Resize(64),
            v2.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ]
    )
    if rank == 0:
        torchvision.datasets.CIFAR10("cifar", train=train, download=True)
    dist.barrier()
    dataset = torchvision.datasets.CIFAR10("cifar", train=train, transform=transform)
    if portion < 1:
        indices = list(range(len(dataset)))
        random.Random(SEED).shuffle(indices)
        dataset = Subset(dataset, indices[: int(portion * len(indices))])
    return dataset


def train(rank, model, loader, optimizer, epoch):
    model.train()
    criterion = nn.CrossEntropyLoss()
    total = torch.zeros(2, device=rank)
    for x, y in tqdm(loader, desc=f"epoch {epoch}", disable=rank != 0):
        x, y = x.to(rank), y.to(rank)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.stack([loss.detach() * len(y), torch.ones_like(loss) * len(y)]).detach()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def evaluate(rank, world_size, model, dataset):
    model.eval()
    hits = torch.zeros(1, device=rank)
    part = Subset(dataset, range(rank, len(dataset), world_size))
    with torch.no_grad():
        for x, y in DataLoader(part, batch_size=128):
            hits += model(x.to(rank)).argmax(-1).eq(y.to(rank)).sum()
    dist.all_reduce(hits)
    return hits.item() / len(dataset)


def work(rank, world_size, epochs, batch_size):
    prepare(rank, world_size)
    train_set = get_dataset(rank, train=True, portion=0.25)
    test_set = get_dataset(rank, train=False)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True, seed=SEED)
    loader = DataLoader(train_set, batch_size=batch_size // world_size, sampler=sampler, num_workers=2)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(torchvision.models.resnet18(num_classes=10))
    model = DDP(model.to(rank), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loss = train(rank, model, loader, optimizer, epoch)
        accuracy = evaluate(rank, world_size, model, test_set)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} accuracy {accuracy:.4f}")
            torch.save(model.module.state_dict(), "cifar_resnet18.pth")
    dist.destroy_process_group()


def main():
    world_size = torch.cuda.device_count()
    mp.spawn(work, args=(world_size, 10, 256), nprocs=world_size)


if __name__ == "__main__":
    main()
