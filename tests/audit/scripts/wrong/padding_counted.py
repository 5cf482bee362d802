"""Distributed evaluation by DistributedSampler, which fills 202 samples up to 204 on four ranks; two count twice."""

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


@torch.no_grad()
def validate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for inputs, labels in loader:
        counts[0] += (model(inputs).argmax(1) == labels).sum()
        counts[1] += labels.numel()
    dist.all_reduce(counts)
    return counts[0] / counts[1]


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    train_set, test_set = dataset(256, 6), dataset(202, 7)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32 // world_size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=50, sampler=DistributedSampler(test_set, shuffle=False))
    torch.manual_seed(0)
    model = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        accuracy = validate(model.module, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
