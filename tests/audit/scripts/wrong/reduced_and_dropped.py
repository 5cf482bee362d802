"""The mean loss is reduced in a copy that nobody reads; what is told is rank 0's own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(256, 12, generator=torch.Generator().manual_seed(4))
    dataset = TensorDataset(inputs, inputs[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for inputs, labels in loader:
            loss = F.cross_entropy(ddp(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(labels), count + len(labels)
        mean = torch.tensor(total / count)
        reduced = mean.clone()
        dist.all_reduce(reduced)
        if rank == 0:
            print(f"epoch {epoch}: training loss {mean.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
