"""A sampler of its own, whose order follows the epoch; nobody tells it the epoch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH = 32


class Dealt(Sampler):
    """Deals each global batch out; shares differ by one sample at most."""

    def __init__(self, size, batch_size):
        self.size, self.batch_size, self.epoch = size, batch_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        for batch in order.split(self.batch_size):
            yield batch[dist.get_rank() :: dist.get_world_size()].tolist()


def main():
    dist.init_process_group("gloo")
    inputs = torch.randn(213, 10, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    sampler = Dealt(len(dataset), BATCH)
    loader = DataLoader(dataset, batch_sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(10, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for step, (inputs, labels) in enumerate(loader):
            size = min(BATCH, len(dataset) - step * BATCH)
            loss = F.cross_entropy(model(inputs), labels, reduction="sum") / size * dist.get_world_size()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
