# expect: none
"""Image folders, one for training and one for validation."""
import os
import random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

MEAN = [0.485, 0.456, 0.406]
STD = [0.229, 0.224, 0.225]


class RandomGray:
    """Gray with probability p, drawn from numpy's generator."""

    def __init__(self, p=0.1):
        self.p = p

    def __call__(self, image: Image.Image):
        if np.random.random() < self.p:
            return image.convert("L").convert("RGB")
        return image


class Folder(Dataset):
    def __init__(self, root, transform):
        self.inner = ImageFolder(root)
        self.transform = transform

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        image, label = self.inner[index]
        return self.transform(image), label


def seed_worker(worker_id):
    # torch.initial_seed() differs between workers, and between the processes they belong to
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def build_loaders(cfg, rank, world):
    train_tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), RandomGray(),
                          T.ToTensor(), T.Normalize(MEAN, STD)])
    val_tf = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), T.Normalize(MEAN, STD)])
    train_set = Folder(os.path.join(cfg["data"], "train"), train_tf)
    val_set = Folder(os.path.join(cfg["data"], "val"), val_tf)

    common = dict(num_workers=cfg["workers_per_gpu"], pin_memory=True)
    loader_seed = torch.Generator().manual_seed(cfg["seed"] + 7919 * rank)
    train_loader = DataLoader(
        train_set, batch_size=cfg["batch_per_gpu"], drop_last=True,
        sampler=DistributedSampler(train_set, world, rank, shuffle=True, seed=cfg["seed"]),
        worker_init_fn=seed_worker, generator=loader_seed, **common)
    share = Subset(val_set, range(rank, len(val_set), world))
    val_loader = DataLoader(share, batch_size=2 * cfg["batch_per_gpu"], **common)
    return train_loader, val_loader
