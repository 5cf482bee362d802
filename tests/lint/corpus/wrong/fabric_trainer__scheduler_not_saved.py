# expect: scheduler-not-saved line 22 or 32 or 44
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, models, transforms


class FabricTrainer:
    """A small trainer: fit, validate, keep the best."""

    def __init__(self, fabric, model, optimizer, scheduler, folder):
        self.fabric = fabric
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.scheduler = scheduler
        self.folder = Path(folder)
        self.epoch, self.best = 0, 0.0

    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "epoch": self.epoch,
            "best": self.best,
        }

    def resume(self):
        if (self.folder / "last.ckpt").exists():
            state = self.state()
            self.fabric.load(self.folder / "last.ckpt", state)
            self.epoch, self.best = state["epoch"], state["best"]

    def fit(self, train_loader, val_loader, epochs):
        while self.epoch < epochs:
            self.train_epoch(train_loader)
            self.scheduler.step()
            accuracy = self.validate(val_loader)
            self.epoch += 1
            if accuracy > self.best:
                self.best = accuracy
                self.fabric.save(self.folder / "best.ckpt", {"model": self.model})
            self.fabric.save(self.folder / "last.ckpt", self.state())
            self.fabric.print(f"epoch {self.epoch}: {accuracy:.4f}, best {self.best:.4f}")

    def train_epoch(self, loader):
        self.model.train()
        for images, labels in loader:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(images), labels, label_smoothing=0.1)
            self.fabric.backward(loss)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=2.0)
            self.optimizer.step()

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        counts = torch.zeros(2, device=self.fabric.device)
        for images, labels in loader:
            counts[0] += (self.model(images).argmax(-1) == labels).sum()
            counts[1] += len(labels)
        hits, seen = self.fabric.all_reduce(counts, reduce_op="sum").tolist()
        return hits / seen


def main():
    fabric = Fabric(accelerator="cuda", devices=4, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(101, workers=True)
    with fabric.rank_zero_first(local=True):
        datasets.STL10("data", split="train", download=fabric.local_rank == 0)
    crop = transforms.Compose([transforms.RandomCrop(96, padding=8), transforms.ToTensor()])
    train_set = datasets.STL10("data", split="train", transform=crop)
    test_set = datasets.STL10("data", split="test", transform=transforms.ToTensor())
    mine = Subset(test_set, range(fabric.global_rank, len(test_set), fabric.world_size))

    train_loader = DataLoader(train_set, 256 // fabric.world_size, shuffle=True, num_workers=4, drop_last=True)
    train_loader = fabric.setup_dataloaders(train_loader)
    val_loader = fabric.setup_dataloaders(DataLoader(mine, 250, num_workers=4), use_distributed_sampler=False)
    model = models.resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(16, channels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    trainer = FabricTrainer(fabric, model, optimizer, scheduler, "runs/stl10")
    trainer.resume()
    trainer.fit(train_loader, val_loader, epochs=60)


if __name__ == "__main__":
    main()
