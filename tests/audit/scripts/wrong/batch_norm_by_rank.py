"""Batch norm over each rank's 8 samples instead of the batch's 32: with N processes another network is trained."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.bn1(self.conv1(x))).mean((2, 3)))


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    images = torch.randn(256, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(images, images[:, 0, :2, :2].flatten(1).argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "net.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
