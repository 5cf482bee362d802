# expect: loss-not-divided line 69 or 68 or 71 or 73
"""Denoise audio spectrograms, Lightning Fabric. Start: python denoise.py --devices 4 ..."""
import argparse
import pathlib

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class ClipFolder(Dataset):
    """Clean log-spectrograms, one .pt tensor (freq, time) each; noise is added here."""

    def __init__(self, folder, noisy_seed=None):
        self.files = sorted(pathlib.Path(folder).glob("*.pt"))
        self.noisy_seed = noisy_seed

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        clean = torch.load(self.files[index], map_location="cpu", weights_only=True)[:256, :256].unsqueeze(0)
        generator = None
        if self.noisy_seed is not None:  # validation: the same noise each time
            generator = torch.Generator().manual_seed(self.noisy_seed + index)
        sigma = 0.1 + 0.4 * torch.rand(1, generator=generator)
        return clean + sigma * torch.randn(clean.shape, generator=generator), clean


class Denoiser(nn.Module):
    def __init__(self, width=64, depth=10):
        super().__init__()
        layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
        layers.append(nn.Conv2d(width, 1, 3, padding=1))
        self.net = nn.Sequential(*layers)

    def forward(self, noisy):
        return noisy - self.net(noisy)


def make_loaders(fabric, args):
    train_set = ClipFolder(args.train_dir)
    val_set = ClipFolder(args.val_dir, noisy_seed=1234)
    sampler = DistributedSampler(
        train_set, num_replicas=fabric.world_size, rank=fabric.global_rank, seed=args.seed, drop_last=True
    )
    val_part = Subset(val_set, range(fabric.global_rank, len(val_set), fabric.world_size))
    train_loader = DataLoader(
        train_set, batch_size=args.micro_batch, sampler=sampler, num_workers=args.workers, drop_last=True
    )
    val_loader = DataLoader(val_part, batch_size=args.micro_batch, num_workers=args.workers)
    # the loaders are dealt out already
    return fabric.setup_dataloaders(train_loader, val_loader, use_distributed_sampler=False)


def train_epoch(fabric, model, optimizer, scheduler, loader, accumulate):
    model.train()
    number = len(loader)
    total = torch.zeros((), device=fabric.device)
    for i, (noisy, clean) in enumerate(loader):
        begin = (i // accumulate) * accumulate
        end = min(begin + accumulate, number)
        is_accumulating = i + 1 < end
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = nn.functional.l1_loss(model(noisy), clean)
            fabric.backward(loss)
        total += loss.detach()
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return fabric.all_reduce(total / number, reduce_op="mean")  # equally many full batches on all ranks


@torch.no_grad()
def validate(fabric, model, loader):
    model.eval()
    sums = torch.zeros(2, device=fabric.device)
    for noisy, clean in loader:
        error = (model(noisy) - clean).square().mean(dim=(1, 2, 3))
        sums[0] += error.sum()
        sums[1] += len(error)
    sums = fabric.all_reduce(sums, reduce_op="sum")
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_dir", required=True)
    parser.add_argument("--val_dir", required=True)
    parser.add_argument("--run_dir", required=True)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--micro_batch", type=int, default=8, help="of a process, between two backward passes")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4, help="of a process; multiplied by their number")
    parser.add_argument("--workers", type=int, default=4, help="of a process")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()

    fabric = Fabric(accelerator="auto", strategy="ddp", devices=args.devices, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(args.seed)

    train_loader, val_loader = make_loaders(fabric, args)
    net = Denoiser()
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr * fabric.world_size)
    updates = args.epochs * -(-len(train_loader) // args.accumulate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    model, optimizer = fabric.setup(net, optimizer)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "best": float("inf")}
    if args.resume:
        fabric.load(args.resume, state)
    fabric.seed_everything(args.seed + 1 + fabric.global_rank + fabric.world_size * state["epoch"])

    run_dir = pathlib.Path(args.run_dir)
    for epoch in range(state["epoch"], args.epochs):
        train_loader.sampler.set_epoch(epoch)
        train_loss = train_epoch(fabric, model, optimizer, scheduler, train_loader, args.accumulate)
        val_mse = validate(fabric, model, val_loader)
        fabric.print(f"epoch {epoch} train l1 {train_loss.item():.5f} val mse {val_mse:.5f}")
        state["epoch"] = epoch + 1
        if val_mse < state["best"]:
            state["best"] = val_mse
            fabric.save(run_dir / "best.ckpt", state)
        fabric.save(run_dir / "last.ckpt", state)


if __name__ == "__main__":
    main()
