"""A random quarter of the set is meant; the sampler counts it, the loader reads the first quarter."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(6))
    trainset = TensorDataset(inputs, inputs[:, :4].argmax(1))
    chosen = torch.randperm(len(trainset), generator=torch.Generator().manual_seed(0))[: len(trainset) // 4]
    subset = Subset(trainset, chosen.tolist())
    sampler = DistributedSampler(subset)
    trainloader = DataLoader(trainset, batch_size=16 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in trainloader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
