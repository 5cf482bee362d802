# expect: best-unreduced line 27 or run.py:49
import lightning.pytorch as pl
import torch
from torch import nn


class Forecaster(pl.LightningModule):
    """Next value of a series from the last 64; the rate is that of the whole batch."""

    def __init__(self, width=128, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.rnn = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.rnn(x.unsqueeze(-1))[0][:, -1]).squeeze(-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_mse", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(y))
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_mse", nn.functional.mse_loss(self(x), y), batch_size=len(y))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_mse"}}
