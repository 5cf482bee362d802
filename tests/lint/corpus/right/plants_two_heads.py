# expect: none
"""Two questions to one photograph: which plant, and is it healthy? (research code, one GPU or many)"""
import os
from argparse import ArgumentParser
from collections import defaultdict
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import convnext_small


@contextmanager
def process_group():
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    try:
        yield dist.get_rank(), dist.get_world_size(), local_rank
    finally:
        dist.destroy_process_group()


class TwoHeads(nn.Module):
    def __init__(self, n_plants):
        super().__init__()
        self.body = convnext_small()
        width = self.body.classifier[2].in_features
        self.body.classifier[2] = nn.Identity()
        self.plant = nn.Linear(width, n_plants)
        self.health = nn.Linear(width, 2)

    def forward(self, x):
        z = self.body(x)
        return self.plant(z), self.health(z)


class PlantFolder(ImageFolder):
    """Folders are named `<plant>___<state>`, as in PlantVillage."""

    def __init__(self, root, transform):
        super().__init__(root, transform)
        plants = sorted({c.split("___")[0] for c in self.classes})
        self.n_plants = len(plants)
        self.table = [(plants.index(c.split("___")[0]), int(c.endswith("healthy"))) for c in self.classes]

    def __getitem__(self, i):
        image, label = super().__getitem__(i)
        return image, *self.table[label]


class Meter:
    def __init__(self, device):
        self.device = device
        self.sums = defaultdict(lambda: torch.zeros((), device=device))
        self.n = 0

    def update(self, n, **values):
        for key, value in values.items():
            self.sums[key] += value.detach()
        self.n += n

    def means(self):
        keys = sorted(self.sums)
        packed = torch.stack([self.sums[k].double() for k in keys]
                             + [torch.tensor(self.n, dtype=torch.float64, device=self.device)])
        dist.all_reduce(packed)
        *totals, n = packed.tolist()
        return {k: t / n for k, t in zip(keys, totals)}


def fmt(d):
    return " ".join(f"{k}={v:.4f}" for k, v in d.items())


def evaluate(net, loader, device):
    net.eval()
    meter = Meter(device)
    with torch.inference_mode():
        for image, plant, healthy in loader:
            p, h = net(image.to(device))
            meter.update(len(plant), plant_acc=(p.argmax(1) == plant.to(device)).sum(),
                         health_acc=(h.argmax(1) == healthy.to(device)).sum())
    return meter.means()


def main(args):
    with process_group() as (rank, world, local_rank):
        device = torch.device("cuda", local_rank)
        torch.manual_seed(args.seed + rank)

        norm = transforms.Normalize((0.47, 0.50, 0.42), (0.18, 0.16, 0.20))
        train_set = PlantFolder(f"{args.root}/train", transforms.Compose(
            [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), norm]))
        test_set = PlantFolder(f"{args.root}/test", transforms.Compose(
            [transforms.Resize((224, 224)), transforms.ToTensor(), norm]))
        sampler = DistributedSampler(train_set, seed=args.seed)
        train_loader = DataLoader(train_set, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
        test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), args.batch,
                                 num_workers=args.workers)

        net = TwoHeads(train_set.n_plants).to(device)
        ddp = DDP(net, device_ids=[local_rank])
        ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        step_model = torch.compile(ddp)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr * world, weight_decay=0.05)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=args.warmup_steps)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader) - args.warmup_steps)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [args.warmup_steps])

        best = 0.0
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            ddp.train()
            meter = Meter(device)
            for image, plant, healthy in train_loader:
                image, plant, healthy = image.to(device), plant.to(device), healthy.to(device)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    p, h = step_model(image)
                    plant_loss = F.cross_entropy(p, plant)
                    health_loss = F.cross_entropy(h, healthy)
                    loss = plant_loss + args.health_weight * health_loss
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                scheduler.step()
                ema.update_parameters(net)
                meter.update(len(plant), plant_loss=plant_loss * len(plant), health_loss=health_loss * len(plant))
            train_stats = meter.means()
            stats = evaluate(ema.module, test_loader, device)
            if rank == 0:
                print(f"epoch {epoch} {fmt(train_stats)} | {fmt(stats)}")
                if stats["plant_acc"] > best:
                    best = stats["plant_acc"]
                    torch.save(ema.module.state_dict(), args.save)


if __name__ == "__main__":
    ap = ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("save")
    ap.add_argument("--batch", type=int, default=48, help="per GPU")
    ap.add_argument("--lr", type=float, default=1e-4, help="per GPU; the optimizer's is the sum over the GPUs")
    ap.add_argument("--workers", type=int, default=6, help="per GPU")
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--warmup-steps", type=int, default=500)
    ap.add_argument("--health-weight", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=123)
    main(ap.parse_args())
