# expect: resume-epoch-anew line 111 or 108
"""Describable textures with Fabric.

    fabric run --accelerator=cuda --devices=6 fabric_dtd_vit.py --root DIR --run DIR
"""
import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as T
from torchvision.datasets import DTD
from torchvision.models import ViT_B_16_Weights, vit_b_16


def build_data(fabric, hp):
    weights = ViT_B_16_Weights.IMAGENET1K_V1
    plain = weights.transforms()  # resizes, crops, normalises
    augment = T.Compose([T.RandomHorizontalFlip(), T.RandomVerticalFlip(), plain])
    if fabric.local_rank == 0:
        DTD(hp.root, split="train", download=True)
    fabric.barrier()

    train = DTD(hp.root, split="train", transform=augment)
    val = DTD(hp.root, split="val", transform=plain)
    test = DTD(hp.root, split="test", transform=plain)

    micro = hp.batch // (fabric.world_size * hp.accum)
    train_dl = DataLoader(train, micro, shuffle=True, drop_last=True, num_workers=hp.workers, pin_memory=True)
    train_dl = fabric.setup_dataloaders(train_dl)  # shards it; each pass over it has a new order

    def own(ds):  # exact shares for evaluation, so Fabric mustn't put in a sampler that pads
        part = Subset(ds, list(range(fabric.global_rank, len(ds), fabric.world_size)))
        loader = DataLoader(part, micro, num_workers=hp.workers, pin_memory=True)
        return fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    return train_dl, own(val), own(test)


def build_model(fabric):
    if fabric.local_rank == 0:
        ViT_B_16_Weights.IMAGENET1K_V1.get_state_dict(progress=False)
    fabric.barrier()
    model = vit_b_16(weights=ViT_B_16_Weights.IMAGENET1K_V1, dropout=0.1)
    model.heads = torch.nn.Linear(768, 47)
    return model


@torch.no_grad()
def accuracy(fabric, model, loader):
    model.eval()
    right = torch.zeros((), device=fabric.device)
    seen = torch.zeros((), device=fabric.device)
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum()
        seen += y.numel()
    right, seen = fabric.all_reduce(torch.stack([right, seen]), reduce_op="sum")
    return (right / seen).item()


def train_epoch(fabric, model, opt, sched, loader, hp):
    model.train()
    n = len(loader)
    total = torch.zeros((), device=fabric.device)
    for i, (x, y) in enumerate(loader):
        window = min(hp.accum, n - i // hp.accum * hp.accum)  # the last one may be shorter
        stepping = (i + 1) % hp.accum == 0 or i + 1 == n
        with fabric.no_backward_sync(model, enabled=not stepping):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            fabric.backward(loss / window)
        if stepping:
            fabric.clip_gradients(model, opt, max_norm=1.0)
            opt.step()
            opt.zero_grad()
        total += loss.detach()
    sched.step()
    return fabric.all_reduce(total / n, reduce_op="mean").item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--run", type=Path, required=True)
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--batch", type=int, default=256, help="images of one optimizer step (all devices)")
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--lr", type=float, default=3e-5, help="for --batch images")
    ap.add_argument("--workers", type=int, default=4, help="per process")
    ap.add_argument("--seed", type=int, default=5)
    hp = ap.parse_args()

    fabric = Fabric(precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(hp.seed, workers=True)  # the samplers' seed, one for all
    torch.manual_seed(hp.seed + fabric.global_rank)  # dropout and the like, each rank its own

    train_dl, val_dl, test_dl = build_data(fabric, hp)
    model = build_model(fabric)
    opt = torch.optim.AdamW(model.parameters(), lr=hp.lr, weight_decay=0.05)
    model, opt = fabric.setup(model, opt)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=hp.epochs)

    state = {"model": model, "opt": opt, "sched": sched, "epoch": 0, "best": 0.0}
    last, best = hp.run / "last.ckpt", hp.run / "best.ckpt"
    if last.exists():
        fabric.load(last, state)
    fabric.barrier()

    for epoch in range(hp.epochs):
        loss = train_epoch(fabric, model, opt, sched, train_dl, hp)
        acc = accuracy(fabric, model, val_dl)
        fabric.print(f"{epoch:02d}  loss {loss:.4f}  val {acc:.4f}")
        state["epoch"] = epoch + 1
        if acc > state["best"]:
            state["best"] = acc
            fabric.save(best, {"model": model})
        fabric.save(last, state)

    fabric.barrier()
    fabric.load(best, {"model": model})
    fabric.print(f"test {accuracy(fabric, model, test_dl):.4f}")


if __name__ == "__main__":
    main()
