# expect: none
import os

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

NORMALIZE = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def training_loader(config, seed):
    dataset = ImageFolder(os.path.join(config["root"], "train"), transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.RandAugment(),
        transforms.ToTensor(),
        NORMALIZE,
    ]))
    return DataLoader(
        dataset,
        batch_size=config["images_per_gpu"],
        sampler=DistributedSampler(dataset, shuffle=True, seed=seed),
        num_workers=config["workers_per_gpu"],
        drop_last=True,
        pin_memory=True,
    )


def validation_loader(config):
    dataset = ImageFolder(os.path.join(config["root"], "val"), transforms.Compose([
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        NORMALIZE,
    ]))
    part = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    return DataLoader(part, batch_size=config["images_per_gpu"], num_workers=config["workers_per_gpu"])
