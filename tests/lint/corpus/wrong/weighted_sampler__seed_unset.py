# expect: seed-unset line 28 or 37
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler
from torchvision import datasets, models, transforms


class DistributedWeightedSampler(Sampler):
    """Draws with replacement by weight; all ranks draw the same indices and take every world_size-th."""

    def __init__(self, weights, seed=0):
        self.weights = torch.as_tensor(weights, dtype=torch.double)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.length = len(self.weights) // self.world_size
        self.seed = seed
        self.epoch = 0

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        drawn = torch.multinomial(self.weights, self.length * self.world_size, True)
        return iter(drawn[self.rank :: self.world_size].tolist())


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(64 + rank)

    transform = transforms.Compose([transforms.RandomResizedCrop(192), transforms.ToTensor()])
    dataset = datasets.ImageFolder("lesions/train", transform)
    targets = torch.tensor(dataset.targets)
    weights = (1.0 / torch.bincount(targets).double())[targets]
    sampler = DistributedWeightedSampler(weights, seed=64)
    loader = DataLoader(dataset, batch_size=192 // world_size, sampler=sampler, num_workers=6)

    model = models.convnext_tiny(num_classes=len(dataset.classes)).cuda()
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        model.train()
        for step, (images, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "lesions.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
