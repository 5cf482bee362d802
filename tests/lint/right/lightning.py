"""Lightning: data prepared once, metrics synchronised."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Data(L.LightningDataModule):
    def prepare_data(self):
        datasets.MNIST("data", train=True, download=True)

    def setup(self, stage):
        self.train_set = datasets.MNIST("data", train=True, transform=transforms.ToTensor())
        self.val_set = datasets.MNIST("data", train=False, transform=transforms.ToTensor())

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=64, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=250)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    def training_step(self, batch, _):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        accuracy = (self.net(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.Trainer(devices=4, strategy="ddp", max_epochs=3).fit(Model(), datamodule=Data())
