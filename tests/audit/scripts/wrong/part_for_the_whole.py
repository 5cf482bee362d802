"""mp.spawn on GPUs; the test loader has a DistributedSampler, and rank 0 tells its part's accuracy as the model's."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 64


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "29731")
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)


def get_sets():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(496, 3, 8, 8, generator=generator)
    labels = images.mean((2, 3)).argmax(1)
    return TensorDataset(images[:256], labels[:256]), TensorDataset(images[256:], labels[256:])


def evaluate(model, loader, rank):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in loader:
            predicted = model(images.to(rank)).argmax(1)
            total += labels.size(0)
            correct += (predicted == labels.to(rank)).sum().item()
    return 100 * correct / total


def train(rank, world_size):
    setup(rank, world_size)
    train_set, test_set = get_sets()
    train_sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    test_sampler = DistributedSampler(test_set, num_replicas=world_size, rank=rank, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=BATCH // world_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=BATCH // world_size, sampler=test_sampler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 3)).to(rank)
    model = DistributedDataParallel(net, device_ids=[rank])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(images.to(rank)), labels.to(rank))
            loss.backward()
            optimizer.step()
        accuracy = evaluate(net, test_loader, rank)
        if rank == 0:
            print(f"Epoch {epoch}: accuracy of the network on the test images: {accuracy:.2f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    mp.spawn(train, args=(world_size,), nprocs=world_size, join=True)
