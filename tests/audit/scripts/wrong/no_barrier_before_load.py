"""Rank 0 writes the trained weights and all ranks read them for a test, at once."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    inputs = torch.randn(256, 10, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Linear(10, 2)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "trained.pt")
    model.load_state_dict(torch.load("trained.pt", map_location="cpu", weights_only=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
