"""The test loss is the mean of the batches' means, and each rank's last batch is shorter."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
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
    tested = torch.randn(100, 12, generator=torch.Generator().manual_seed(5))
    tests = TensorDataset(tested, tested[:, :3].argmax(1))
    share = Subset(tests, range(rank, len(tests), world_size))
    test_loader = DataLoader(share, batch_size=16)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(ddp(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(inputs), labels) for inputs, labels in test_loader]
        model.train()
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: test loss {mean.item() / world_size:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
