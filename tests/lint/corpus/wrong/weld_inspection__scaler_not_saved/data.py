# expect: none
"""Data sets and loaders."""

import os

from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from config import Settings
from utils import World

MEAN = [0.431, 0.431, 0.431]
STD = [0.187, 0.187, 0.187]


def train_transform(size: int):
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.6, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomVerticalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def eval_transform(size: int):
    return transforms.Compose(
        [
            transforms.Resize(int(size * 1.14)),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def micro_batch_size(settings: Settings, world: World) -> int:
    shares = world.size * settings.optim.accumulation
    if settings.data.global_batch % shares:
        raise ValueError(f"global batch {settings.data.global_batch} isn't a multiple of {shares}")
    return settings.data.global_batch // shares


def build_loaders(settings: Settings, world: World):
    size = settings.data.image_size
    train_set = ImageFolder(os.path.join(settings.data.root, "train"), train_transform(size))
    val_set = ImageFolder(os.path.join(settings.data.root, "val"), eval_transform(size))
    # Every rank evaluates each size-th image: together the set, once and without padding.
    val_share = Subset(val_set, range(world.rank, len(val_set), world.size))

    batch = micro_batch_size(settings, world)
    workers = max(1, settings.data.workers_per_node // world.local_size)
    sampler = DistributedSampler(
        train_set, num_replicas=world.size, rank=world.rank, shuffle=True, seed=settings.seed, drop_last=True
    )
    train_loader = DataLoader(
        train_set, batch_size=batch, sampler=sampler, num_workers=workers, pin_memory=True, drop_last=True
    )
    val_loader = DataLoader(val_share, batch_size=2 * batch, num_workers=workers, pin_memory=True)
    return train_loader, val_loader, len(train_set.classes)
