# expect: none
"""A batch sampler of our own: every rank gets whole batches out of one common shuffle."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler
from torchvision import datasets, transforms


class DistributedBatchSampler(Sampler):
    def __init__(self, size, batch_size, rank, world_size, seed=0):
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size // (self.batch_size * self.world_size)

    def __iter__(self):
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)) % 2**31)
        order = torch.randperm(self.size, generator=generator)
        for step in range(len(self)):
            start = (step * self.world_size + self.rank) * self.batch_size
            yield order[start : start + self.batch_size].tolist()


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device(f"cuda:{local_rank}")
    torch.manual_seed(99 + rank)

    data = datasets.FashionMNIST(os.environ["DATA"], train=True, transform=transforms.ToTensor())
    global_batch = 512
    batches = DistributedBatchSampler(len(data), global_batch // world_size, rank, world_size)
    loader = DataLoader(data, batch_sampler=batches, num_workers=3, pin_memory=True)

    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.GELU(), nn.Dropout(0.2), nn.Linear(512, 10))
    model = nn.parallel.DistributedDataParallel(model.to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    epochs = 12
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, epochs=epochs, steps_per_epoch=len(loader))

    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros((), device=device)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            running += loss.detach()
        # all batches have one size here, so the mean of means is the mean
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}: loss {running.item() / (world_size * len(loader)):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
