# expect: none
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import utils

TO_FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.47, 0.49, 0.41], [0.18, 0.16, 0.2])]


def train_transform():
    return v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide(), *TO_FLOAT])


def val_transform():
    return v2.Compose([v2.Resize(248, antialias=True), v2.CenterCrop(224), *TO_FLOAT])


def split(dataset, share, seed):
    """Indices of the training and of the validation images; the same on all ranks."""
    n_val = int(share * len(dataset))
    generator = torch.Generator().manual_seed(seed)
    train, val = random_split(range(len(dataset)), [len(dataset) - n_val, n_val], generator=generator)
    return train.indices, val.indices


def loaders(args):
    augmented = ImageFolder(args.root, transform=train_transform())
    plain = ImageFolder(args.root, transform=val_transform())
    train_idx, val_idx = split(augmented, args.val_share, args.seed)

    train_set = Subset(augmented, train_idx)
    val_set = Subset(plain, val_idx[utils.rank() :: utils.world_size()])
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch,
        sampler=DistributedSampler(train_set, seed=args.seed),
        num_workers=args.workers,
        pin_memory=True,
        drop_last=True,
    )
    val_loader = DataLoader(val_set, batch_size=2 * args.batch, num_workers=args.workers, pin_memory=True)
    return train_loader, val_loader, augmented.classes
