# expect: find-unused line 83
"""Distil a ResNet-101 (weights given) into a small student with dropout.

torchrun --nproc_per_node 4 distil_cars.py --teacher teacher.pth --cars /data/cars
"""
import argparse
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, models, transforms
from torch.utils.tensorboard import SummaryWriter


@contextmanager
def process_group():
    dist.init_process_group("nccl")
    try:
        yield dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    finally:
        dist.destroy_process_group()


class Student(nn.Module):
    def __init__(self, classes, p):
        super().__init__()
        self.body = models.mobilenet_v2().features
        self.neck = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(p))
        self.out = nn.Linear(1280, classes)

    def forward(self, x):
        return self.out(self.neck(self.body(x)))


def kd_loss(student, teacher, labels, tau, alpha):
    soft = F.kl_div(F.log_softmax(student / tau, 1), F.softmax(teacher / tau, 1), reduction="batchmean")
    return alpha * tau * tau * soft + (1 - alpha) * F.cross_entropy(student, labels)


def datasets_of(folder):
    norm = transforms.Normalize((0.471, 0.460, 0.455), (0.290, 0.289, 0.295))
    tr = transforms.Compose([transforms.RandomResizedCrop(224, (0.5, 1)), transforms.RandomHorizontalFlip(),
                             transforms.ToTensor(), norm])
    ev = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor(), norm])
    return datasets.ImageFolder(f"{folder}/train", tr), datasets.ImageFolder(f"{folder}/test", ev)


@torch.no_grad()
def score(net, loader, device):
    net.eval()
    good, n = torch.zeros((), device=device), torch.zeros((), device=device)
    for x, y in loader:
        good += (net(x.to(device)).argmax(1) == y.to(device)).sum()
        n += len(y)
    both = torch.stack([good, n])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def main(args):
    with process_group() as (rank, world, local):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        torch.manual_seed(args.seed + rank)

        train_set, test_set = datasets_of(args.cars)
        sampler = DistributedSampler(train_set, drop_last=True)
        worker_draws = torch.Generator().manual_seed(args.seed + 7919 * (rank + 1))
        train = DataLoader(train_set, args.batch, sampler=sampler, num_workers=5, drop_last=True,
                           pin_memory=True, generator=worker_draws)
        test = DataLoader(Subset(test_set, range(rank, len(test_set), world)), 2 * args.batch, num_workers=5)

        teacher = models.resnet101(num_classes=len(train_set.classes))
        teacher.load_state_dict(torch.load(args.teacher, map_location="cpu", weights_only=True))
        teacher.to(device).eval().requires_grad_(False)

        student = Student(len(train_set.classes), 0.3).to(device)
        student = DistributedDataParallel(student, device_ids=[local], find_unused_parameters=True)
        optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr * world)
        plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
        board = SummaryWriter(args.logs) if rank == 0 else None

        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            student.train()
            total = torch.zeros((), device=device)
            for x, y in train:
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                with torch.no_grad():
                    target = teacher(x)
                loss = kd_loss(student(x), target, y, args.tau, args.alpha)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach()
            plan.step()

            dist.all_reduce(total)
            accuracy = score(student.module, test, device)
            if board is not None:
                board.add_scalar("train/loss", total.item() / (world * len(train)), epoch)
                board.add_scalar("test/accuracy", accuracy, epoch)
        if rank == 0:
            board.close()
            torch.save(student.module.state_dict(), args.student)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--cars", required=True)
    ap.add_argument("--teacher", required=True)
    ap.add_argument("--student", default="student.pth")
    ap.add_argument("--logs", default="tb")
    ap.add_argument("--epochs", type=int, default=70)
    ap.add_argument("--batch", type=int, default=48, help="per GPU")
    ap.add_argument("--lr", type=float, default=2e-4, help="per GPU, times their number")
    ap.add_argument("--tau", type=float, default=4.0)
    ap.add_argument("--alpha", type=float, default=0.7)
    ap.add_argument("--seed", type=int, default=31)
    main(ap.parse_args())
