# expect: none
import argparse

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from torchvision import transforms
from torchvision.datasets import EuroSAT
from torchvision.models import convnext_tiny


class Unpadded(DistributedSampler):
    """Each rank's share in order, without repeating samples to make the shares even."""

    def __iter__(self):
        return iter(range(self.rank, len(self.dataset), self.num_replicas))

    def __len__(self):
        return len(range(self.rank, len(self.dataset), self.num_replicas))


class EuroData(L.LightningDataModule):
    def __init__(self, root, batch_size, workers):
        super().__init__()
        self.root, self.batch_size, self.workers = root, batch_size, workers

    def prepare_data(self):
        EuroSAT(self.root, download=True)

    def setup(self, stage=None):
        to_tensor = [transforms.ToTensor()]
        augment = [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip(),
                   transforms.RandomResizedCrop(64, scale=(0.6, 1.0))]
        augmented = EuroSAT(self.root, transform=transforms.Compose(augment + to_tensor))
        plain = EuroSAT(self.root, transform=transforms.Compose(to_tensor))
        n_val = len(plain) // 10
        fit, val = random_split(range(len(plain)), [len(plain) - n_val, n_val],
                                generator=torch.Generator().manual_seed(2024))
        self.fit_set = Subset(augmented, list(fit))
        self.val_set = Subset(plain, list(val))

    def train_dataloader(self):
        return DataLoader(self.fit_set, self.batch_size, shuffle=True, drop_last=True,
                          num_workers=self.workers, pin_memory=True)

    def val_dataloader(self):
        sampler = None
        if self.trainer.world_size > 1:
            sampler = Unpadded(self.val_set, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(self.val_set, self.batch_size, sampler=sampler, num_workers=self.workers)


class EuroNet(L.LightningModule):
    def __init__(self, lr, seed, epochs):
        super().__init__()
        self.save_hyperparameters()
        self.net = convnext_tiny(num_classes=10)
        self.mean = (0.344, 0.380, 0.408)
        self.std = (0.203, 0.137, 0.115)
        self.val_acc = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def on_fit_start(self):
        torch.manual_seed(self.hparams.seed + self.global_rank)

    def forward(self, x):
        mean = x.new_tensor(self.mean).view(1, 3, 1, 1)
        std = x.new_tensor(self.std).view(1, 3, 1, 1)
        return self.net((x - mean) / std)

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        images, labels = batch
        logits = self(images)
        self.val_acc.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), batch_size=len(labels), sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def configure_optimizers(self):
        # hparams.lr is per process
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr * self.trainer.world_size,
                                      weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.hparams.epochs)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


def cli():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--lr", type=float, default=1e-4, help="per GPU")
    parser.add_argument("--batch-size", type=int, default=64, help="per GPU")
    parser.add_argument("--workers", type=int, default=4, help="per GPU")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--devices", type=int, default=-1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ckpt")
    return parser.parse_args()


def main():
    args = cli()
    L.seed_everything(5, workers=True)
    trainer = L.Trainer(
        accelerator="gpu", devices=args.devices, num_nodes=args.nodes, strategy="ddp",
        precision="bf16-mixed", max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max", save_last=True), LearningRateMonitor()],
    )
    data = EuroData(args.root, args.batch_size, args.workers)
    trainer.fit(EuroNet(args.lr, 5, args.epochs), data, ckpt_path=args.ckpt)


if __name__ == "__main__":
    main()
