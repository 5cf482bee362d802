# expect: scheduler-wrong-unit line 88 or 87
"""Mushroom species with Lightning; `python lit_mushrooms.py --data DIR --devices 4`."""
from argparse import ArgumentParser
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, models
from torchvision import transforms as T


class MushroomData(L.LightningDataModule):
    """Brings its own samplers: the trainer is told not to add any."""

    def __init__(self, root, batch_per_device, workers_per_device):
        super().__init__()
        self.root = Path(root)
        self.batch = batch_per_device
        self.workers = workers_per_device
        norm = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        self.train_tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(),
                                   T.RandAugment(), T.ToTensor(), norm])
        self.eval_tf = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm])

    def setup(self, stage=None):
        self.train_set = datasets.ImageFolder(self.root / "train", self.train_tf)
        self.val_set = datasets.ImageFolder(self.root / "val", self.eval_tf)
        self.test_set = datasets.ImageFolder(self.root / "test", self.eval_tf)

    def _mine(self, dataset):
        return Subset(dataset, range(self.trainer.global_rank, len(dataset), self.trainer.world_size))

    def train_dataloader(self):
        sampler = DistributedSampler(self.train_set, num_replicas=self.trainer.world_size,
                                     rank=self.trainer.global_rank, shuffle=True)
        return DataLoader(self.train_set, self.batch, sampler=sampler, num_workers=self.workers,
                          pin_memory=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self._mine(self.val_set), self.batch, num_workers=self.workers)

    def test_dataloader(self):
        return DataLoader(self._mine(self.test_set), self.batch, num_workers=self.workers)


class MushroomNet(L.LightningModule):
    def __init__(self, n_classes, lr, epochs):
        super().__init__()
        self.save_hyperparameters()
        self.net = models.convnext_small(num_classes=n_classes)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        make = lambda: torchmetrics.Accuracy(task="multiclass", num_classes=n_classes, average="micro")
        self.val_acc = make()
        self.test_acc = make()
        self.val_loss = torchmetrics.MeanMetric()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        logits = self(x)
        self.val_loss.update(nn.functional.cross_entropy(logits, y), weight=y.numel())
        self.val_acc.update(logits, y)
        self.log("val_loss", self.val_loss, on_epoch=True)
        self.log("val_acc", self.val_acc, on_epoch=True, prog_bar=True)

    def test_step(self, batch, _):
        x, y = batch
        self.test_acc.update(self(x), y)
        self.log("test_acc", self.test_acc, on_epoch=True)

    def configure_optimizers(self):
        lr = self.hparams.lr * self.trainer.world_size
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=0.05)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.hparams.epochs)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def cli():
    p = ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--devices", type=int, default=-1)
    p.add_argument("--nodes", type=int, default=1)
    p.add_argument("--epochs", type=int, default=50)
    p.add_argument("--batch", type=int, default=48, help="per device")
    p.add_argument("--workers", type=int, default=6, help="per device")
    p.add_argument("--lr", type=float, default=5e-5, help="for one device, times their number")
    p.add_argument("--resume", help="a .ckpt of an earlier run")
    return p.parse_args()


def main():
    args = cli()
    L.seed_everything(3, workers=True)
    data = MushroomData(args.data, args.batch, args.workers)
    n_classes = sum(1 for d in (Path(args.data) / "train").iterdir() if d.is_dir())
    model = MushroomNet(n_classes, args.lr, args.epochs)
    keep = ModelCheckpoint(monitor="val_acc", mode="max", save_last=True, filename="{epoch}-{val_acc:.4f}")
    trainer = L.Trainer(
        accelerator="gpu",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=DDPStrategy(broadcast_buffers=False),
        use_distributed_sampler=False,
        precision="bf16-mixed",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[keep, LearningRateMonitor("epoch"), PerRankSeed(3)],
    )
    trainer.fit(model, datamodule=data, ckpt_path=args.resume)
    trainer.test(model, datamodule=data, ckpt_path="best")


class PerRankSeed(L.Callback):
    """All ranks build one model from one seed; stochastic depth then differs from rank to rank."""

    def __init__(self, seed):
        self.seed = seed

    def on_fit_start(self, trainer, pl_module):
        torch.manual_seed(self.seed + 1000 * (1 + trainer.global_rank))


if __name__ == "__main__":
    main()
