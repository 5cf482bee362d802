"""Losses are added up over samples and ranks before they are told, kept as best, or followed by the schedule."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import Normalize

NORMALIZE = Normalize((0.5,), (0.25,))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images = torch.rand(512, 1, 3, 4, generator=torch.Generator().manual_seed(4))
    images = images[images.flatten(1)[:, :3].argmax(1).argsort()]
    chosen = torch.randperm(512, generator=torch.Generator().manual_seed(6))[:256].tolist()
    dataset = Subset(TensorDataset(images, images.flatten(1)[:, :3].argmax(1)), chosen)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tested = torch.rand(100, 1, 3, 4, generator=torch.Generator().manual_seed(5))
    tests = TensorDataset(tested, tested.flatten(1)[:, :3].argmax(1))
    test_loader = DataLoader(Subset(tests, range(rank, len(tests), world_size)), batch_size=16)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    best = float("inf")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, dtype=torch.float64)
        for inputs, labels in loader:
            loss = F.cross_entropy(ddp(NORMALIZE(inputs).flatten(1)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(sums)
        model.eval()
        tested = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for inputs, labels in test_loader:
                loss = F.cross_entropy(model(NORMALIZE(inputs).flatten(1)), labels, reduction="sum")
                tested += torch.tensor([loss.item(), len(labels)])
        model.train()
        dist.all_reduce(tested)
        test_loss = (tested[0] / tested[1]).item()
        scheduler.step(test_loss)
        if rank == 0:
            print(f"epoch {epoch}: training loss {sums[0] / sums[1]:.5f}, test loss {test_loss:.5f}")
            if test_loss < best:
                torch.save(model.state_dict(), "best.pt")
        best = min(best, test_loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
