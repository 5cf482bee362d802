# expect: download-every-rank line 28 or 26
"""Flowers-102 with Lightning: a data module, a module, a trainer."""
import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchvision import models, transforms
from torchvision.datasets import Flowers102


class Flowers(L.LightningDataModule):
    def __init__(self, root, global_batch, workers, seed):
        super().__init__()
        self.save_hyperparameters()
        norm = transforms.Normalize([0.43, 0.38, 0.29], [0.29, 0.24, 0.27])
        self.training_view = transforms.Compose([
            transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), norm])
        self.plain = transforms.Compose([
            transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), norm])

    def setup(self, stage):
        root = self.hparams.root
        self.train_set = Flowers102(root, split="train", transform=self.training_view, download=True)
        self.val_set = Flowers102(root, split="val", transform=self.plain)
        self.test_set = Flowers102(root, split="test", transform=self.plain)

    def _exact(self, dataset):
        """Every process its own samples, none of them twice."""
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(Subset(dataset, range(rank, len(dataset), world)), batch_size=64,
                          num_workers=self.hparams.workers, pin_memory=True)

    def train_dataloader(self):
        sampler = DistributedSampler(self.train_set, num_replicas=self.trainer.world_size,
                                     rank=self.trainer.global_rank, seed=self.hparams.seed)
        return DataLoader(self.train_set, batch_size=self.hparams.global_batch // self.trainer.world_size,
                          sampler=sampler, num_workers=self.hparams.workers, pin_memory=True, drop_last=True)

    def val_dataloader(self):
        return self._exact(self.val_set)

    def test_dataloader(self):
        return self._exact(self.test_set)


class Classifier(L.LightningModule):
    def __init__(self, lr, weight_decay, epochs, seed):
        super().__init__()
        self.save_hyperparameters()
        self.net = models.efficientnet_b0(weights=None, num_classes=102, dropout=0.3)
        self.val_acc = MulticlassAccuracy(num_classes=102, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes=102, average="micro")
        self.val_loss = MeanMetric()

    def forward(self, x):
        return self.net(x)

    def on_fit_start(self):
        # weights were drawn alike everywhere, what follows is drawn per process
        torch.manual_seed(self.hparams.seed + 1 + self.global_rank)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_loss.update(F.cross_entropy(logits, y), weight=y.numel())
        self.val_acc.update(logits, y)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_acc.update(self(x), y)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr,
                                      weight_decay=self.hparams.weight_decay)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.hparams.epochs)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--logs", required=True)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128, help="of all devices together")
    parser.add_argument("--lr", type=float, default=1e-3, help="for the batch of all devices")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3, help="per device")
    parser.add_argument("--seed", type=int, default=8)
    args = parser.parse_args()

    L.seed_everything(args.seed, workers=True)
    data = Flowers(args.root, args.batch, args.workers, args.seed)
    model = Classifier(args.lr, args.weight_decay, args.epochs, args.seed)
    best = ModelCheckpoint(monitor="val/acc", mode="max", save_last=True)
    trainer = L.Trainer(
        accelerator="gpu", devices=args.devices, strategy="ddp", sync_batchnorm=True,
        use_distributed_sampler=False, precision="bf16-mixed", max_epochs=args.epochs,
        default_root_dir=args.logs, callbacks=[best, LearningRateMonitor("epoch")])
    trainer.fit(model, datamodule=data)
    trainer.test(datamodule=data, ckpt_path="best")


if __name__ == "__main__":
    main()
