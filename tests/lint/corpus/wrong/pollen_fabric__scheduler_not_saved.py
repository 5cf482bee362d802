# expect: scheduler-not-saved line 56 or 54 or 85 or 98
"""Pollen grains under the microscope. Lightning Fabric, with checkpoints to go on from.

fabric run --accelerator cuda --devices 4 pollen_fabric.py --data /data/pollen --run /runs/pollen/0012
"""
import argparse
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.models import vit_b_16
from torchvision.transforms import v2


def get_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5, help="epochs")
    parser.add_argument("--images-per-device", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-5, help="of one device, scaled by their number")
    parser.add_argument("--cpus-per-device", type=int, default=6)
    parser.add_argument("--seed", type=int, default=600)
    return parser


def images(folder, training):
    first = [v2.RandomResizedCrop(224, (0.6, 1.0)), v2.RandomRotation(180)] if training else [v2.Resize((224, 224))]
    rest = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.76, 0.69, 0.73], [0.14, 0.19, 0.15])]
    return ImageFolder(str(folder), v2.Compose(first + rest))


class Pollen:
    def __init__(self, fabric, args):
        self.fabric, self.args = fabric, args
        fit = images(args.data / "fit", True)
        val = images(args.data / "val", False)
        rank, world = fabric.global_rank, fabric.world_size
        self.sampler = DistributedSampler(fit, world, rank, shuffle=True, drop_last=True, seed=args.seed)
        kw = dict(batch_size=args.images_per_device, num_workers=args.cpus_per_device, pin_memory=True)
        self.fit_loader, self.val_loader = fabric.setup_dataloaders(
            DataLoader(fit, sampler=self.sampler, drop_last=True, **kw),
            DataLoader(Subset(val, range(rank, len(val), world)), **kw),
            use_distributed_sampler=False)

        net = vit_b_16(num_classes=len(fit.classes), dropout=0.1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr * world, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        self.model, self.optimizer = fabric.setup(net, optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer, "epoch": 0}

    def factor(self, epoch):
        if epoch < self.args.warmup:
            return (epoch + 1) / (self.args.warmup + 1)
        return 0.97 ** (epoch - self.args.warmup)

    def fit_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        for image, label in self.fit_loader:
            loss = F.cross_entropy(self.model(image), label, label_smoothing=0.05)
            self.optimizer.zero_grad()
            self.fabric.backward(loss)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        found = torch.zeros(2, device=self.fabric.device)
        for image, label in self.val_loader:
            found[0] += (self.model(image).argmax(dim=1) == label).sum()
            found[1] += label.numel()
        found = self.fabric.all_reduce(found, reduce_op="sum")
        return (found[0] / found[1]).item()

    def go_on(self, path):
        if path.exists():
            self.fabric.load(path, self.state)
            self.fabric.print("going on from epoch", self.state["epoch"])

    def run(self):
        path = self.args.run / "state.ckpt"
        self.go_on(path)
        for epoch in range(self.state["epoch"], self.args.epochs):
            self.fit_epoch(epoch)
            self.scheduler.step()
            accuracy = self.validate()
            self.fabric.log_dict({"accuracy": accuracy, "epoch": epoch}, step=epoch)
            self.fabric.print(f"{epoch}: {accuracy:.4f}")
            self.state["epoch"] = epoch + 1
            self.fabric.save(path, self.state)


def main():
    args = get_parser().parse_args()
    logger = CSVLogger(root_dir=str(args.run), name="log")
    fabric = L.Fabric(accelerator="cuda", devices=args.devices, strategy="ddp", precision="bf16-mixed", loggers=logger)
    fabric.launch()
    fabric.seed_everything(args.seed + fabric.global_rank)
    if fabric.is_global_zero:
        args.run.mkdir(parents=True, exist_ok=True)
    fabric.barrier()
    Pollen(fabric, args).run()


if __name__ == "__main__":
    main()
