# expect: rate-not-adjusted line 106 or 64
"""Forecast of a battery's cell voltage from charging curves, with Lightning."""
import argparse
import os
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, random_split


class CurveDataset(Dataset):
    def __init__(self, file: Path):
        with np.load(file) as f:
            self.curves = f["curves"]
            self.targets = f["targets"]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, idx: int):
        return torch.from_numpy(self.curves[idx]), torch.tensor(self.targets[idx])


class CurveDataModule(L.LightningDataModule):
    def __init__(self, raw_dir: str, cache_dir: str, batch_size: int, num_workers: int, split_seed: int = 3):
        super().__init__()
        self.save_hyperparameters()
        self.cache_file = Path(cache_dir) / "curves.npz"

    def prepare_data(self):
        # once for each machine; Lightning lets the other processes wait
        if self.cache_file.exists():
            return
        curves, targets = [], []
        for csv in sorted(Path(self.hparams.raw_dir).glob("*.csv")):
            rows = np.loadtxt(csv, delimiter=",", skiprows=1, dtype=np.float32)
            for start in range(0, len(rows) - 512, 64):
                curves.append(rows[start : start + 480])
                targets.append(rows[start + 511, 0])
        curves, targets = np.stack(curves), np.asarray(targets, dtype=np.float32)
        curves = (curves - curves.mean((0, 1))) / (curves.std((0, 1)) + 1e-6)
        np.savez(self.cache_file, curves=curves, targets=targets)

    def setup(self, stage: str):
        full = CurveDataset(self.cache_file)
        generator = torch.Generator().manual_seed(self.hparams.split_seed)
        self.train_set, self.val_set = random_split(full, [0.85, 0.15], generator=generator)

    def train_dataloader(self):
        sampler = DistributedSampler(
            self.train_set,
            num_replicas=self.trainer.world_size,
            rank=self.trainer.global_rank,
            shuffle=True,
            drop_last=True,
        )  # Lightning calls its set_epoch
        return DataLoader(
            self.train_set,
            batch_size=self.hparams.batch_size,
            sampler=sampler,
            num_workers=self.hparams.num_workers,
            drop_last=True,
            pin_memory=True,
        )

    def val_dataloader(self):
        # disjoint parts, no sample twice
        part = Subset(self.val_set, range(self.trainer.global_rank, len(self.val_set), self.trainer.world_size))
        return DataLoader(part, batch_size=4 * self.hparams.batch_size, num_workers=self.hparams.num_workers)


class VoltageForecaster(L.LightningModule):
    def __init__(self, channels: int = 3, hidden: int = 192, dropout: float = 0.2, lr: float = 1e-3, seed: int = 0):
        super().__init__()
        self.save_hyperparameters()
        self.gru = nn.GRU(channels, hidden, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Dropout(dropout), nn.Linear(hidden, 1))
        self.val_rmse = torchmetrics.MeanSquaredError(squared=False)  # adds up over the processes by itself

    def forward(self, x):
        out, _ = self.gru(x)
        return self.head(out[:, -1]).squeeze(-1)

    def on_fit_start(self):
        # seed_everything made all processes alike; dropout shall differ
        torch.manual_seed(self.hparams.seed + 1 + self.global_rank)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.huber_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_rmse.update(self(x), y)
        self.log("val_rmse", self.val_rmse, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        # hparams.lr was found on one GPU
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_end(self):
        if self.trainer.is_global_zero:
            torch.save(self.state_dict(), Path(self.trainer.default_root_dir) / "final_weights.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--raw-dir", required=True)
    parser.add_argument("--cache-dir", required=True)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="of one process")
    parser.add_argument("--max-epochs", type=int, default=50)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    L.seed_everything(args.seed, workers=True)
    os.makedirs(args.run_dir, exist_ok=True)
    workers = max(1, (os.cpu_count() or 1) // args.devices)
    data = CurveDataModule(args.raw_dir, args.cache_dir, args.batch_size, workers)
    model = VoltageForecaster(seed=args.seed)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=args.max_epochs,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        default_root_dir=args.run_dir,
        callbacks=[
            ModelCheckpoint(monitor="val_rmse", mode="min", save_last=True, dirpath=args.run_dir),
            LearningRateMonitor("step"),
        ],
    )
    trainer.fit(model, datamodule=data, ckpt_path=args.resume)


if __name__ == "__main__":
    main()
