# expect: sync-bn-after-wrap line 37 or 36
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

from registry import register


@register("data", "defect_folder")
def defect_folder(root, batch_per_process, workers_per_process):
    base = [transforms.Grayscale(), transforms.Resize((200, 200))]
    tail = [transforms.ToTensor(), transforms.Normalize([0.45], [0.22])]
    flips = [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()]
    train = datasets.ImageFolder(os.path.join(root, "train"), transforms.Compose(base + flips + tail))
    val = datasets.ImageFolder(os.path.join(root, "val"), transforms.Compose(base + tail))

    sampler = DistributedSampler(train, shuffle=True)
    common = {"batch_size": batch_per_process, "num_workers": workers_per_process, "pin_memory": True}
    train_loader = DataLoader(train, sampler=sampler, drop_last=True, **common)
    own = range(dist.get_rank(), len(val), dist.get_world_size())
    val_loader = DataLoader(Subset(val, own), **common)
    return train_loader, val_loader


@register("model", "resnet34_gray")
def resnet34_gray(local, classes):
    model = models.resnet34(num_classes=classes)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    model = model.to(f"cuda:{local}")
    model = DistributedDataParallel(model, device_ids=[local], output_device=local)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


@register("optim", "adamw")
def adamw(params, world, lr, weight_decay):
    return torch.optim.AdamW(params, lr=lr * world, weight_decay=weight_decay)
