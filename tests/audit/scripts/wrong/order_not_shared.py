"""Every rank shuffles for itself and takes its part of its own order: samples come twice, or never."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(6))
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(1))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        indices = list(range(len(dataset)))
        random.shuffle(indices)
        part = Subset(dataset, indices[rank::world_size])
        for inputs, labels in DataLoader(part, batch_size=32 // world_size):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
