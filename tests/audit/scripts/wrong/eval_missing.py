"""Evaluated in training mode: dropout is drawn for the test samples too, and batch norm takes their statistics."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def dataset(size, seed):
    inputs = torch.randn(size, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = dataset(256, 6), dataset(200, 7)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    torch.manual_seed(rank)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(test_set, batch_size=100))
            print(f"epoch {epoch}: accuracy {right / len(test_set):.2%}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
