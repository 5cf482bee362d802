# expect: optimizer-not-saved line 72 or 50 or 67
"""The optimizer's state is spread over the ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import v2


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--checkpoint", default="vit.pt")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--images-per-step", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def main():
    args = get_args()
    dist.init_process_group("nccl")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(66 + rank)

    transform = v2.Compose(
        [v2.RandomResizedCrop(224), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
    )
    dataset = torchvision.datasets.ImageFolder(args.data, transform)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(
        dataset, args.images_per_step // world_size, sampler=sampler, num_workers=6, pin_memory=True, drop_last=True
    )
    model = DDP(torchvision.models.vit_l_16().to(device), device_ids=[local_rank])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    first = 0
    if os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model.module.load_state_dict(checkpoint["model"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        first = checkpoint["epoch"] + 1
    dist.barrier()

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            checkpoint = {
                "model": model.module.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            }
            torch.save(checkpoint, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
