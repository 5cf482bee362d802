# expect: none
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms
from torchvision.datasets import EuroSAT

NORM = transforms.Normalize((0.344, 0.380, 0.408), (0.203, 0.137, 0.116))


def make_loaders(args, rank, world):
    if int(os.environ["LOCAL_RANK"]) == 0:
        EuroSAT(args.data, download=True)
    dist.barrier()
    flips = [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()]
    augmented = EuroSAT(args.data, transform=transforms.Compose(flips + [transforms.ToTensor(), NORM]))
    plain = EuroSAT(args.data, transform=transforms.Compose([transforms.ToTensor(), NORM]))
    order = torch.randperm(len(plain), generator=torch.Generator().manual_seed(17)).tolist()
    held_out = len(order) // 5
    train_set = Subset(augmented, order[held_out:])
    test_set = Subset(plain, order[:held_out][rank::world])
    train = DataLoader(train_set, args.batch, sampler=DistributedSampler(train_set), num_workers=3, pin_memory=True,
                       drop_last=True)
    test = DataLoader(test_set, args.batch, num_workers=3)
    return train, test
