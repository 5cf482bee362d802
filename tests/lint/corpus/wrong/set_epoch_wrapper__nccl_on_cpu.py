# expect: nccl-on-cpu line 55
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EpochLoader:
    """A loader that tells its sampler which epoch begins."""

    def __init__(self, dataset, batch_size, rank, world_size, **options):
        self.sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
        self.loader = DataLoader(dataset, batch_size=batch_size, sampler=self.sampler, **options)
        self.epoch = 0

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)


def make_data(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(10_000, 32, generator=g)
    return TensorDataset(x, (x[:, :4].sum(1) > 0).long())


def fit(model, loader, optimizer, device, epochs):
    for epoch in range(epochs):
        model.train()
        sums = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.stack(
                [loss.detach() * len(x), torch.full_like(loss, len(x))]
            ).detach()
        dist.all_reduce(sums)
        if dist.get_rank() == 0:
            print(epoch, (sums[0] / sums[1]).item())


def main():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(5 + rank)
    loader = EpochLoader(make_data(0), 256 // world_size, rank, world_size, num_workers=1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    model = DDP(model, device_ids=[local_rank] if use_cuda else None)
    fit(model, loader, torch.optim.Adam(model.parameters(), 1e-3), device, epochs=5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
