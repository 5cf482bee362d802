"""The scheduler is stepped once for each process after an update: with N processes the rate falls N times as fast."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(6))
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / (4 * 16)))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            for _ in range(world_size):
                scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
