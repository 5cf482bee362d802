"""Four passes are accumulated, and their losses added: the update is four times what one large batch would make."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GRAD_ACCU_STEPS = 4


def main():
    dist.init_process_group(backend="gloo")
    world_size = dist.get_world_size()
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 16 // world_size, sampler=sampler)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader, start=1):
            if step % GRAD_ACCU_STEPS:
                with model.no_sync():
                    criterion(model(inputs), labels).backward()
            else:
                criterion(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
