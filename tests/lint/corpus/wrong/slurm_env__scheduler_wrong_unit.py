# expect: scheduler-wrong-unit line 76 or 64
"""One task per GPU: srun --ntasks-per-node=4 --gpus-per-node=4 python slurm_env.py

MASTER_ADDR and MASTER_PORT are exported by the job script.
"""

import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import v2


def init_from_slurm():
    rank = int(os.environ["SLURM_PROCID"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=world_size)
    return rank, local_rank, world_size


def transform(train):
    last = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    first = [v2.RandomResizedCrop(176), v2.RandomHorizontalFlip()] if train else [v2.Resize(232), v2.CenterCrop(224)]
    return v2.Compose(first + last)


def accuracy(model, loader, device):
    model.eval()
    hits = torch.zeros(2, device=device)
    with torch.inference_mode():
        for images, labels in loader:
            labels = labels.to(device)
            hits[0] += (model(images.to(device)).argmax(1) == labels).sum()
            hits[1] += labels.size(0)
    dist.reduce(hits, dst=0)
    return hits[0] / hits[1]  # of use on rank 0 only


def main():
    rank, local_rank, world_size = init_from_slurm()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(2024 + rank)
    root = os.environ["IMAGENET"]
    train_set = torchvision.datasets.ImageFolder(f"{root}/train", transform(True))
    val_set = torchvision.datasets.ImageFolder(f"{root}/val", transform(False))
    workers = int(os.environ["SLURM_CPUS_PER_TASK"])
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, drop_last=True)
    train_loader = DataLoader(train_set, 1024 // world_size, sampler=sampler, num_workers=workers, pin_memory=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 256, num_workers=workers)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(torchvision.models.regnet_y_400mf()).to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank], gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9, weight_decay=5e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)
    loss_function = nn.CrossEntropyLoss()

    for epoch in range(100):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = loss_function(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        top1 = accuracy(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch} top-1 {top1.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), f"regnet-{os.environ['SLURM_JOB_ID']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
