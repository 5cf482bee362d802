# expect: none
import torch
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

MEAN, STD = (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)


def get_datasets(root):
    normalize = transforms.Normalize(MEAN, STD)
    augment = transforms.Compose([transforms.RandomCrop(32, 4), transforms.ToTensor(), normalize])
    plain = transforms.Compose([transforms.ToTensor(), normalize])
    return datasets.CIFAR100(root, True, augment), datasets.CIFAR100(root, False, plain)


def get_loaders(root, global_batch, rank, world_size):
    train_set, test_set = get_datasets(root)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True)
    train_loader = DataLoader(train_set, global_batch // world_size, sampler=sampler, num_workers=4, drop_last=True)
    mine = torch.arange(rank, len(test_set), world_size).tolist()
    test_loader = DataLoader(Subset(test_set, mine), 500, shuffle=False, num_workers=2)
    return train_loader, test_loader, sampler
