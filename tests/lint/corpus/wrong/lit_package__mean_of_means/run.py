# expect: none
import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from module import Forecaster


class Series(pl.LightningDataModule):
    def __init__(self, path, global_batch):
        super().__init__()
        self.path, self.global_batch = path, global_batch

    def setup(self, stage):
        series = torch.load(self.path, map_location="cpu", weights_only=True)
        windows = series.unfold(0, 65, 1)
        windows = TensorDataset(windows[:, :64], windows[:, 64])
        generator = torch.Generator().manual_seed(1)
        self.train_set, val_set = random_split(windows, [0.8, 0.2], generator=generator)
        self.val_set = Subset(val_set, range(self.trainer.global_rank, len(val_set), self.trainer.world_size))

    def train_dataloader(self):
        per_process = self.global_batch // self.trainer.world_size
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        sampler = torch.utils.data.DistributedSampler(self.train_set, world_size, rank, drop_last=True)
        return DataLoader(self.train_set, per_process, sampler=sampler, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, 1024)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("series")
    parser.add_argument("--batch", type=int, default=2048, help="of all processes")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--resume")
    args = parser.parse_args()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=args.devices,
        strategy="ddp",
        use_distributed_sampler=False,
        gradient_clip_val=0.5,
        max_epochs=100,
        callbacks=[ModelCheckpoint(monitor="val_mse", save_last=True), EarlyStopping("val_mse", patience=10)],
    )
    trainer.fit(Forecaster(), datamodule=Series(args.series, args.batch), ckpt_path=args.resume)


if __name__ == "__main__":
    main()
