# expect: none
import os

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2


def view(hp, *ops):
    steps = [v2.ToImage(), *ops, v2.CenterCrop(160), v2.ToDtype(torch.float32, scale=True),
             v2.Normalize([0.08], [0.11])]
    return ImageFolder(os.path.join(hp.images, "stamps"), v2.Compose(steps))


def galaxy_loaders(hp, comm):
    spun = view(hp, v2.RandomRotation(180), v2.RandomVerticalFlip())
    still = view(hp)
    g = torch.Generator().manual_seed(hp.seed)
    mixed = torch.randperm(len(still), generator=g).tolist()
    n_dev = len(mixed) // 10
    train, dev = Subset(spun, mixed[n_dev:]), Subset(still, mixed[:n_dev])

    sampler = DistributedSampler(train, comm.size, comm.rank, seed=hp.seed)
    train_dl = DataLoader(train, hp.batch, sampler=sampler, num_workers=hp.workers, drop_last=True,
                          pin_memory=True)
    dev_dl = DataLoader(Subset(dev, range(comm.rank, len(dev), comm.size)), 2 * hp.batch,
                        num_workers=hp.workers)
    return train_dl, dev_dl, sampler, len(still.classes)
