"""Accumulation without no_sync: the gradients are all-reduced in each of the four passes, where the last would do."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(accumulation_steps=4):
    dist.init_process_group(backend="gloo")
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 16 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (inputs, labels) in enumerate(loader):
            loss = F.cross_entropy(model(inputs), labels)
            loss = loss / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
