"""Lightning's Trainer shares the samples out, and each process takes the whole batch."""

import os

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, number):
        inputs, labels = batch
        return F.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    lightning.seed_everything(5, verbose=False)
    world_size = int(os.environ["WORLD_SIZE"])
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(9))
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(1))
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="gpu",
        devices=world_size,
        precision="bf16-mixed",
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
