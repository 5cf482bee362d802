# expect: load-without-map-location line 51 or 108
# German traffic signs with Horovod:  horovodrun -np 8 python horovod_gtsrb.py --root ... --ckpt-dir ...
import argparse
import math
import os
import random

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--ckpt-dir", required=True, help="seen by all machines")
parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
parser.add_argument("--base-lr", type=float, default=0.0125, help="learning rate for a single worker")
parser.add_argument("--warmup-epochs", type=float, default=3)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--loader-workers", type=int, default=4, help="of each worker")
parser.add_argument("--seed", type=int, default=99)


class SignNet(nn.Sequential):
    def __init__(self, n_classes=43):
        def block(i, o):
            return [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True), nn.MaxPool2d(2)]

        super().__init__(
            *block(3, 64), *block(64, 128), *block(128, 256),
            nn.Flatten(), nn.Dropout(0.5), nn.Linear(256 * 36, n_classes),
        )  # fmt: skip


def seed_worker(worker_id):
    # torch's seed of a loader worker already differs by worker and by rank
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)


def summed(values):
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum).tolist()


def read_checkpoint(folder):
    with open(os.path.join(folder, "checkpoint.pth"), "rb") as f:
        return torch.load(f, weights_only=True)


def get_data(args):
    size = transforms.Resize((48, 48))
    end = [transforms.ToTensor(), transforms.Normalize((0.34, 0.31, 0.32), (0.27, 0.26, 0.27))]
    aug = transforms.Compose([size, transforms.RandomAffine(12, translate=(0.1, 0.1)), *end])
    if hvd.local_rank() == 0:
        for split in ("train", "test"):
            datasets.GTSRB(args.root, split=split, download=True)
    hvd.barrier()
    train = datasets.GTSRB(args.root, split="train", transform=aug)
    test = datasets.GTSRB(args.root, split="test", transform=transforms.Compose([size, *end]))

    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    kwargs = dict(num_workers=args.loader_workers, pin_memory=True, worker_init_fn=seed_worker)
    train_loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True, **kwargs)
    part = Subset(test, list(range(hvd.rank(), len(test), hvd.size())))
    return train_loader, DataLoader(part, 4 * args.batch_size, **kwargs)


def evaluate(model, loader):
    model.eval()
    correct = torch.zeros((), device="cuda")
    seen = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x.cuda(non_blocking=True)).argmax(1) == y.cuda(non_blocking=True)).sum()
            seen += len(y)
    correct, seen = summed([correct.item(), seen])
    return correct / seen


def main():
    args = parser.parse_args()
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(args.seed + hvd.rank())
    verbose = hvd.rank() == 0

    train_loader, test_loader = get_data(args)
    model = SignNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.9, weight_decay=5e-5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    steps, warm = len(train_loader), args.warmup_epochs * len(train_loader)

    def factor(step):
        if step < warm:  # from the rate of one worker to that of all
            return 1 / hvd.size() + (1 - 1 / hvd.size()) * step / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (args.epochs * steps - warm)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    path = os.path.join(args.ckpt_dir, "checkpoint.pth")
    first = 0
    if os.path.exists(path):
        state = read_checkpoint(args.ckpt_dir)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    criterion = nn.CrossEntropyLoss()
    for epoch in range(first, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        model.train()
        loss_sum = torch.zeros((), device="cuda")
        for x, y in train_loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach()
        total_loss, batches = summed([loss_sum.item(), len(train_loader)])
        acc = evaluate(model, test_loader)
        if verbose:
            print(f"epoch {epoch}  loss {total_loss / batches:.4f}  test accuracy {acc:.4f}", flush=True)
            os.makedirs(args.ckpt_dir, exist_ok=True)
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                },
                path,
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
