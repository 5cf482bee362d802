# expect: none
"""Loaders for the shelf index: {"classes": [...], "train": [[path, label], ...], "val": ..., "test": ...}."""
import json

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision.io import ImageReadMode, read_image
from torchvision.transforms import v2
import torch

MEAN = (0.51, 0.47, 0.44)
STD = (0.24, 0.24, 0.25)


class ShelfCrops(Dataset):
    def __init__(self, items, transform):
        self.items = items
        self.transform = transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        path, label = self.items[i]
        return self.transform(read_image(path, ImageReadMode.RGB)), label


def transforms(training):
    head = [v2.RandomResizedCrop(192, scale=(0.6, 1.0)), v2.ColorJitter(0.2, 0.2, 0.2)] if training \
        else [v2.Resize((192, 192))]
    return v2.Compose(head + [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def _own_share(dataset):
    return Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))


def build_loaders(cfg):
    with open(cfg.index) as f:
        index = json.load(f)
    train_set = ShelfCrops(index["train"], transforms(True))
    val_set = ShelfCrops(index["val"], transforms(False))
    test_set = ShelfCrops(index["test"], transforms(False))
    common = dict(batch_size=cfg.batch_per_gpu, num_workers=cfg.workers_per_gpu, pin_memory=True)
    train = DataLoader(train_set, sampler=DistributedSampler(train_set, seed=cfg.seed), drop_last=True, **common)
    val = DataLoader(_own_share(val_set), **common)
    test = DataLoader(_own_share(test_set), **common)
    return train, val, test, len(index["classes"])
