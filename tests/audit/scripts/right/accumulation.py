"""Gradient accumulation with no_sync: the loss is divided, the last group is shorter and makes its update too."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4
MICRO_BATCH = 16  # of all processes together


def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(176, 16, generator=generator)
    return TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())


def train_epoch(model, loader, criterion, optimizer):
    model.train()
    batches = len(loader)
    for i, (inputs, labels) in enumerate(loader):
        first = i - i % ACCUMULATE
        group = min(ACCUMULATE, batches - first)
        last = i + 1 == first + group
        with contextlib.nullcontext() if last else model.no_sync():
            loss = criterion(model(inputs), labels) / group
            loss.backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def main():
    dist.init_process_group(backend="gloo")
    world_size = dist.get_world_size()
    dataset = data()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, MICRO_BATCH // world_size, sampler=sampler)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, nn.CrossEntropyLoss(), optimizer)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
