# expect: metric-unreduced line 104 or 106
"""Adversarial domain adaptation: labelled synthetic images, unlabelled photographs, one discriminator."""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.weight * grad, None


class DomainNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        trunk = models.resnet18()
        width = trunk.fc.in_features
        trunk.fc = nn.Identity()
        self.trunk = trunk
        self.classify = nn.Linear(width, classes)
        self.domain = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 1))

    def forward(self, x, weight=0.0):
        h = self.trunk(x)
        return self.classify(h), self.domain(Reverse.apply(h, weight)).squeeze(1)


def image_folder(root, name, augment):
    steps = [transforms.RandomResizedCrop(224, (0.6, 1.0)), transforms.RandomHorizontalFlip()] if augment else \
            [transforms.Resize(256), transforms.CenterCrop(224)]
    steps += [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)]
    return ImageFolder(os.path.join(root, name), transforms.Compose(steps))


def endless(loader, sampler, first_round):
    for turn in itertools.count(first_round):
        sampler.set_epoch(turn)
        yield from loader


def main(args):
    torch.cuda.set_device(args.gpu)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)

    synthetic = image_folder(args.root, "synthetic", True)
    photos = image_folder(args.root, "photos_unlabelled", True)
    photos_test = image_folder(args.root, "photos_test", False)
    synthetic_order = DistributedSampler(synthetic, seed=args.seed)
    photo_order = DistributedSampler(photos, seed=args.seed + 1)
    share = dict(num_workers=args.workers, pin_memory=True)
    synthetic_dl = DataLoader(synthetic, args.batch, sampler=synthetic_order, drop_last=True, **share)
    photo_dl = DataLoader(photos, args.batch, sampler=photo_order, drop_last=True, **share)
    test_part = Subset(photos_test, range(rank, len(photos_test), world))
    test_dl = DataLoader(test_part, args.batch, **share)

    net = nn.SyncBatchNorm.convert_sync_batchnorm(DomainNet(len(synthetic.classes))).cuda()
    ddp = nn.parallel.DistributedDataParallel(net, device_ids=[args.gpu])
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr * world ** 0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
    photo_stream = endless(photo_dl, photo_order, 0)

    for epoch in range(args.epochs):
        synthetic_order.set_epoch(epoch)
        ddp.train()
        sums = torch.zeros(3, device="cuda")
        strength = 2 / (1 + 2.718 ** (-10 * epoch / args.epochs)) - 1
        for (xs, ys), (xt, _) in zip(synthetic_dl, photo_stream):
            xs, ys, xt = xs.cuda(non_blocking=True), ys.cuda(non_blocking=True), xt.cuda(non_blocking=True)
            logits, domain = ddp(torch.cat([xs, xt]), strength)
            which = torch.cat([torch.zeros(len(xs), device=xs.device), torch.ones(len(xt), device=xt.device)])
            loss_class = F.cross_entropy(logits[:len(xs)], ys)
            loss_domain = F.binary_cross_entropy_with_logits(domain, which)
            optimizer.zero_grad()
            (loss_class + loss_domain).backward()
            optimizer.step()
            sums += torch.stack([loss_class.detach(), loss_domain.detach(), torch.ones_like(loss_class.detach())])
        scheduler.step()

        net.eval()
        tally = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for x, y in test_dl:
                guess = net(x.cuda(non_blocking=True))[0].argmax(1)
                tally[0] += (guess == y.cuda(non_blocking=True)).sum()
                tally[1] += len(y)
        dist.all_reduce(tally)
        if rank == 0:
            c, d, steps = sums.tolist()
            hits, seen = tally.tolist()
            print(f"{epoch}: class {c / steps:.3f} domain {d / steps:.3f} photo accuracy {hits / seen:.2%}")
            torch.save(net.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("save")
    p.add_argument("--batch", type=int, default=32, help="of each domain, on each GPU")
    p.add_argument("--lr", type=float, default=2e-4, help="for one GPU; grows with the square root of their number")
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--workers", type=int, default=3, help="for each loader of each GPU")
    p.add_argument("--seed", type=int, default=8)
    ns = p.parse_args()
    ns.gpu = int(os.environ["LOCAL_RANK"])
    main(ns)
