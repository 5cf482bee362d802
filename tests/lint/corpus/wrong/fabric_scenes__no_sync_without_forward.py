# expect: no-sync-without-forward line 67 or 66 or 68
"""Places-like scene classification with Lightning Fabric (fabric run --devices=4 fabric_scenes.py ...)."""
import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.models import resnet50
from torchvision.transforms import v2 as T


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, default=Path("scenes"))
    p.add_argument("--devices", type=int, default=2)
    p.add_argument("--nodes", type=int, default=1)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--micro-batch", type=int, default=32, help="images per GPU and forward")
    p.add_argument("--window", type=int, default=4, help="micro batches per update")
    p.add_argument("--lr", type=float, default=0.1, help="for 256 images per update")
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


def make_data(opt, fabric):
    shared = [T.ToDtype(torch.float32, scale=True), T.Normalize([0.458, 0.441, 0.408], [0.269, 0.266, 0.285])]
    tr = T.Compose([T.ToImage(), T.RandomResizedCrop(224), T.RandomHorizontalFlip(), *shared])
    ev = T.Compose([T.ToImage(), T.Resize(256), T.CenterCrop(224), *shared])
    train = ImageFolder(opt.data / "train", tr)
    test = ImageFolder(opt.data / "test", ev)
    sampler = DistributedSampler(train, fabric.world_size, fabric.global_rank, seed=1, drop_last=True)
    train_dl = DataLoader(train, opt.micro_batch, sampler=sampler, num_workers=4, drop_last=True)
    mine = Subset(test, range(fabric.global_rank, len(test), fabric.world_size))
    test_dl = DataLoader(mine, opt.micro_batch * 2, num_workers=4)
    train_dl, test_dl = fabric.setup_dataloaders(train_dl, test_dl, use_distributed_sampler=False)
    return train_dl, sampler, test_dl


def evaluate(fabric, model, loader):
    net = model.module
    net.eval()
    stats = torch.zeros(3, device=fabric.device)
    with torch.no_grad(), fabric.autocast():
        for x, y in loader:
            z = net(x)
            stats[0] += F.cross_entropy(z, y, reduction="sum")
            stats[1] += (z.argmax(1) == y).sum()
            stats[2] += y.numel()
    stats = fabric.all_reduce(stats, reduce_op="sum")
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def train_epoch(fabric, model, optimizer, scheduler, loader, window):
    model.train()
    last = len(loader) - 1
    rest = len(loader) % window
    for i, (x, y) in enumerate(loader):
        # the final window of an epoch may be shorter than the others
        size = rest if i > last - rest else window
        update = (i + 1) % window == 0 or i == last
        loss = F.cross_entropy(model(x), y)
        with fabric.no_backward_sync(model, enabled=not update):
            fabric.backward(loss / size)
        if update:
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


def main():
    opt = options()
    fabric = Fabric(accelerator="cuda", devices=opt.devices, num_nodes=opt.nodes, strategy="ddp",
                    precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(17 + fabric.global_rank)

    train_dl, sampler, test_dl = make_data(opt, fabric)
    updates = math.ceil(len(train_dl) / opt.window)
    images = opt.micro_batch * opt.window * fabric.world_size
    model = resnet50(num_classes=len(test_dl.dataset.dataset.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=opt.lr * images / 256, momentum=0.9, weight_decay=5e-5)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, opt.epochs * updates)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    file = opt.out / "state.ckpt"
    if opt.resume:
        fabric.load(file, state)

    for epoch in range(state["epoch"], opt.epochs):
        sampler.set_epoch(epoch)
        train_epoch(fabric, model, optimizer, scheduler, train_dl, opt.window)
        loss, acc = evaluate(fabric, model, test_dl)
        fabric.print(f"{epoch}: test loss {loss:.3f}, accuracy {acc:.3%}")
        state["epoch"] = epoch + 1
        fabric.save(file, state)


if __name__ == "__main__":
    main()
