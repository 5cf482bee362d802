"""The data set normalises its images, and the loop does it once more."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import Normalize

NORMALIZE = Normalize((0.5,), (0.25,))


class Images(TensorDataset):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return NORMALIZE(image), label


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    images = torch.rand(256, 1, 3, 4, generator=torch.Generator().manual_seed(4))
    dataset = Images(images, images.flatten(1)[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(ddp(NORMALIZE(inputs).flatten(1)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
