# expect: batch-not-divided line 46 or 49 or 50
"""Fungi classification with Lightning: ConvNeXt, DDP, a tenth of the images for a quick look."""
import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchvision.datasets import ImageFolder
from torchvision.models import convnext_small
from torchvision.transforms import v2


class FungiData(L.LightningDataModule):
    def __init__(self, root, global_batch=256, workers=4, quick=False, seed=0):
        super().__init__()
        self.save_hyperparameters()

    def transform(self, train):
        last = [
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.43, 0.40, 0.34], std=[0.24, 0.23, 0.22]),
        ]
        if train:
            return v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ColorJitter(0.3, 0.3), *last])
        return v2.Compose([v2.Resize(256), v2.CenterCrop(224), *last])

    def setup(self, stage):
        root, seed = self.hparams.root, self.hparams.seed
        self.train_set = ImageFolder(os.path.join(root, "train"), self.transform(True))
        self.val_set = ImageFolder(os.path.join(root, "val"), self.transform(False))
        self.test_set = ImageFolder(os.path.join(root, "test"), self.transform(False))
        if self.hparams.quick:
            # a random tenth, the same on all ranks
            g = torch.Generator().manual_seed(seed)
            keep = torch.randperm(len(self.train_set), generator=g)[: len(self.train_set) // 10]
            self.train_set = Subset(self.train_set, keep.tolist())

    @property
    def batch(self):
        return min(self.hparams.global_batch, len(self.train_set))

    def loader(self, dataset, **kwargs):
        return DataLoader(
            dataset, batch_size=self.batch, num_workers=self.hparams.workers, pin_memory=True, **kwargs
        )

    def share(self, dataset):
        """Every rank's part for evaluation, nothing twice."""
        return UnrepeatedDistributedSampler(
            dataset, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, shuffle=False
        )

    def train_dataloader(self):
        # Lightning puts in a DistributedSampler and tells it the epochs
        return self.loader(self.train_set, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return self.loader(self.val_set, sampler=self.share(self.val_set))

    def test_dataloader(self):
        return self.loader(self.test_set, sampler=self.share(self.test_set))


class Fungi(L.LightningModule):
    def __init__(self, classes, lr=4e-4, weight_decay=0.05, seed=0):
        super().__init__()
        self.save_hyperparameters()
        self.net = convnext_small(num_classes=classes, stochastic_depth_prob=0.2)
        self.val_acc = MulticlassAccuracy(classes, average="micro")
        self.val_f1 = MulticlassF1Score(classes, average="macro")
        self.test_acc = MulticlassAccuracy(classes, average="micro")

    def forward(self, x):
        return self.net(x)

    def on_fit_start(self):
        # from here on each rank has its own random numbers (dropped paths, augmentations)
        torch.manual_seed(self.hparams.seed + self.global_rank)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(y))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.val_f1.update(logits, y)

    def on_validation_epoch_end(self):
        # torchmetrics adds the ranks' counts up when it computes
        self.log("val/acc", self.val_acc.compute(), prog_bar=True)
        self.log("val/f1", self.val_f1.compute())
        self.val_acc.reset()
        self.val_f1.reset()

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_acc(self(x), y)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=self.hparams.lr, total_steps=total)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--global-batch", type=int, default=256, help="over all devices")
    ap.add_argument("--lr", type=float, default=4e-4, help="for --global-batch")
    ap.add_argument("--nodes", type=int, default=1)
    ap.add_argument("--quick", action="store_true")
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()

    L.seed_everything(11, workers=True)
    data = FungiData(args.root, args.global_batch, quick=args.quick, seed=11)
    classes = len(next(os.walk(os.path.join(args.root, "train")))[1])
    model = Fungi(classes, lr=args.lr, seed=11)
    best = ModelCheckpoint(os.path.join(args.out, "checkpoints"), monitor="val/acc", mode="max", save_last=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices="auto",
        num_nodes=args.nodes,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        default_root_dir=args.out,
        callbacks=[best, LearningRateMonitor("step")],
    )
    trainer.fit(model, datamodule=data, ckpt_path=args.resume)
    trainer.test(model, datamodule=data, ckpt_path="best")


if __name__ == "__main__":
    main()
