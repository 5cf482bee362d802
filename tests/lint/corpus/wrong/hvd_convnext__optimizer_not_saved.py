# expect: optimizer-not-saved line 112 or 96 or 97 or 113
"""ConvNeXt with Horovod: horovodrun -np 8 python hvd_convnext.py --data ... --ckpt-dir ..."""
import argparse
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import torch.utils.data
from torchvision import datasets, models, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--ckpt-dir", required=True, help="seen by all machines")
parser.add_argument("--batch-size", type=int, default=64, help="per worker")
parser.add_argument("--base-lr", type=float, default=1.25e-4, help="for one worker")
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--warmup", type=int, default=4)
parser.add_argument("--threads", type=int, default=4, help="loader processes per worker")
parser.add_argument("--seed", type=int, default=6)


def lr_at(epoch, args):
    if epoch < args.warmup:
        return (epoch + 1) / args.warmup
    return 0.1 ** ((epoch - args.warmup) // 20)


def load_data(args):
    stats = transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    train_ds = datasets.ImageFolder(os.path.join(args.data, "train"), transforms.Compose([
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        stats,
    ]))
    val_ds = datasets.ImageFolder(os.path.join(args.data, "val"), transforms.Compose([
        transforms.Resize(236),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        stats,
    ]))
    sampler = torch.utils.data.distributed.DistributedSampler(
        train_ds, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    train_iter = torch.utils.data.DataLoader(
        train_ds, batch_size=args.batch_size, sampler=sampler, num_workers=args.threads,
        pin_memory=True, drop_last=True)
    part = torch.utils.data.Subset(val_ds, range(hvd.rank(), len(val_ds), hvd.size()))
    val_iter = torch.utils.data.DataLoader(
        part, batch_size=args.batch_size, num_workers=args.threads, pin_memory=True)
    return train_iter, val_iter, sampler, len(train_ds.classes)


def train(model, optimizer, data):
    model.train()
    acc = torch.zeros(2, device="cuda")
    for x, target in data:
        x, target = x.cuda(non_blocking=True), target.cuda(non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        acc[0] += loss.detach() * target.size(0)
        acc[1] += target.size(0)
    acc = hvd.allreduce(acc, op=hvd.Sum, name="train_loss")
    return (acc[0] / acc[1]).item()


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    counts = torch.zeros(2, device="cuda")
    for x, target in data:
        x, target = x.cuda(non_blocking=True), target.cuda(non_blocking=True)
        counts[0] += (model(x).argmax(1) == target).sum()
        counts[1] += target.size(0)
    counts = hvd.allreduce(counts, op=hvd.Sum, name="val_counts")
    return (counts[0] / counts[1]).item()


def main():
    args = parser.parse_args()
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(args.seed + hvd.rank())
    train_iter, val_iter, sampler, classes = load_data(args)

    model = models.convnext_small(weights=None, num_classes=classes).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.base_lr * hvd.size(), weight_decay=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: lr_at(e, args))

    first_epoch = 0
    ckpt = os.path.join(args.ckpt_dir, "convnext.pt")
    if os.path.exists(ckpt):
        blob = torch.load(ckpt, map_location="cpu", weights_only=True)
        model.load_state_dict(blob["model"])
        scheduler.load_state_dict(blob["scheduler"])
        first_epoch = blob["epoch"]

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        train_loss = train(model, optimizer, train_iter)
        scheduler.step()
        val_acc = evaluate(model, val_iter)
        if hvd.rank() == 0:
            print(f"{epoch}: loss {train_loss:.4f}, val acc {val_acc:.4f}")
            os.makedirs(args.ckpt_dir, exist_ok=True)
            torch.save({
                "model": model.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch + 1,
            }, ckpt)
    hvd.shutdown()


if __name__ == "__main__":
    main()
