# expect: none
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import wandb
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import regnet_y_800mf


class TileDataset(Dataset):
    """Tiles of a folder per class; tensors in [0, 1] come out, augmented but not normalised."""

    def __init__(self, root, augment):
        steps = [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()] if augment else []
        self.folder = ImageFolder(root, transforms.Compose(steps + [transforms.ToTensor()]))

    @property
    def classes(self):
        return self.folder.classes

    def __len__(self):
        return len(self.folder)

    def __getitem__(self, index):
        return self.folder[index]


class Normalised(nn.Module):
    """A network with the normalisation in front, done on the GPU."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.tensor([0.36, 0.38, 0.34]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.20, 0.18, 0.18]).view(1, 3, 1, 1))

    def forward(self, x):
        return self.net((x - self.mean) / self.std)


def mixup(x, y, n, alpha):
    lam = random.betavariate(alpha, alpha)
    order = torch.randperm(x.size(0), device=x.device)
    hot = F.one_hot(y, n).float()
    return lam * x + (1 - lam) * x[order], lam * hot + (1 - lam) * hot[order]


def weighted_mean(total, count):
    pair = torch.stack([total, count])
    dist.all_reduce(pair)
    return (pair[0] / pair[1]).item()


def train(model, loader, optimizer, n, alpha, device):
    model.train()
    total, count = torch.zeros((), device=device), torch.zeros((), device=device)
    for x, y in loader:
        x, y = mixup(x.to(device, non_blocking=True), y.to(device, non_blocking=True), n, alpha)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach() * x.size(0)
        count += x.size(0)
    return weighted_mean(total, count)


def test(net, loader, device):
    net.eval()
    hit, count = torch.zeros((), device=device), torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in loader:
            hit += (net(x.to(device)).argmax(1) == y.to(device)).sum()
            count += y.size(0)
    return weighted_mean(hit, count)


def main(a):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(a.seed + rank)
    random.seed(a.seed + rank)

    train_tiles = TileDataset(os.path.join(a.root, "train"), augment=True)
    test_tiles = TileDataset(os.path.join(a.root, "test"), augment=False)
    n = len(train_tiles.classes)
    sampler = DistributedSampler(train_tiles, seed=a.seed)
    train_loader = DataLoader(train_tiles, batch_size=a.batch_size, sampler=sampler, num_workers=a.workers,
                              pin_memory=True, drop_last=True)
    test_loader = DataLoader(Subset(test_tiles, range(rank, len(test_tiles), world_size)),
                             batch_size=a.batch_size, num_workers=a.workers)

    net = nn.SyncBatchNorm.convert_sync_batchnorm(Normalised(regnet_y_800mf(num_classes=n))).to(device)
    model = nn.parallel.DistributedDataParallel(net, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=a.lr * world_size, momentum=0.9, weight_decay=5e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=a.epochs)

    if rank == 0:
        wandb.init(project="satellite", config=vars(a))
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        loss = train(model, train_loader, optimizer, n, a.alpha, device)
        scheduler.step()
        accuracy = test(net, test_loader, device)
        if rank == 0:
            wandb.log({"epoch": epoch, "loss": loss, "accuracy": accuracy, "lr": scheduler.get_last_lr()[0]})
    if rank == 0:
        torch.save(net.state_dict(), os.path.join(wandb.run.dir, "regnet.pt"))
        wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--batch-size", type=int, default=64, help="per GPU")
    ap.add_argument("--lr", type=float, default=0.05, help="per GPU, is multiplied by the number of GPUs")
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--workers", type=int, default=4, help="per GPU")
    ap.add_argument("--alpha", type=float, default=0.3)
    ap.add_argument("--seed", type=int, default=0)
    main(ap.parse_args())
