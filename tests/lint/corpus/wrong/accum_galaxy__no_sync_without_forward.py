# expect: no-sync-without-forward line 49 or 45
"""Galaxy morphology, large images and little memory: gradients of several batches make a step.

torchrun --nproc_per_node=4 accum_galaxy.py --images /data/galaxy --micro-batch 8 --accumulate 8
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import models, transforms
from torchvision.datasets import ImageFolder


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--images", required=True)
    p.add_argument("--micro-batch", type=int, default=8, help="images in one forward of one GPU")
    p.add_argument("--accumulate", type=int, default=8, help="micro-batches to a step")
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--lr", type=float, default=1e-3, help="for 512 images to a step")
    p.add_argument("--workers", type=int, default=4, help="for each GPU")
    return p.parse_args()


def windows(n, size):
    """How many micro-batches the window of each micro-batch has: the last may be shorter."""
    full = n // size * size
    return [size if i < full else n - full for i in range(n)]


def train_epoch(model, batches, optimizer, loss_fn, accumulate, device):
    model.train()
    sizes = windows(len(batches), accumulate)
    loss_sum = torch.zeros((), device=device)
    optimizer.zero_grad()
    for i, (img, target) in enumerate(batches):
        img = img.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        ends = (i + 1) % accumulate == 0 or i + 1 == len(batches)
        loss = loss_fn(model(img), target) / sizes[i]
        if ends:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
        loss_sum += loss.detach() * sizes[i]
        if ends:
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(loss_sum, op=dist.ReduceOp.AVG)
    return (loss_sum / len(batches)).item()


def score(net, batches, device):
    net.eval()
    right, total = 0, 0
    with torch.no_grad():
        for img, target in batches:
            prediction = net(img.to(device)).argmax(1)
            right = right + (prediction == target.to(device)).sum()
            total += target.size(0)
    pair = torch.stack([right.float(), torch.tensor(float(total), device=device)])
    dist.all_reduce(pair)
    return (pair[0] / pair[1]).item()


def main():
    opt = options()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    device = torch.device(f"cuda:{gpu}")
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2718 + rank)

    norm = transforms.Normalize((0.168, 0.163, 0.159), (0.127, 0.117, 0.113))
    grow = transforms.Compose([transforms.RandomRotation(90), transforms.RandomHorizontalFlip(),
                               transforms.CenterCrop(512), transforms.ToTensor(), norm])
    keep = transforms.Compose([transforms.CenterCrop(512), transforms.ToTensor(), norm])
    galaxies = ImageFolder(os.path.join(opt.images, "train"), grow)
    held = ImageFolder(os.path.join(opt.images, "val"), keep)
    sampler = DistributedSampler(galaxies)
    batches = DataLoader(galaxies, opt.micro_batch, sampler=sampler, num_workers=opt.workers, drop_last=True,
                         pin_memory=True)
    held_batches = DataLoader(Subset(held, range(rank, len(held), world)), opt.micro_batch, num_workers=opt.workers)

    net = models.convnext_base(num_classes=len(galaxies.classes)).to(device)
    model = DistributedDataParallel(net, device_ids=[gpu], gradient_as_bucket_view=True)
    images_per_step = opt.micro_batch * opt.accumulate * world
    optimizer = torch.optim.AdamW(model.parameters(), lr=opt.lr * images_per_step / 512)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=opt.epochs)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, batches, optimizer, loss_fn, opt.accumulate, device)
        schedule.step()
        accuracy = score(net, held_batches, device)
        if rank == 0:
            print(f"{epoch:3d} loss {loss:.4f} accuracy {accuracy:.4f}")
    if rank == 0:
        torch.save(net.state_dict(), os.path.join(opt.images, "convnext_galaxy.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
