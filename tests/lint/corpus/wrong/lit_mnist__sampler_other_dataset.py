# expect: sampler-other-dataset line 52 or 53
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.classification import MulticlassAccuracy
from torchvision import transforms
from torchvision.datasets import MNIST


class LitClassifier(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy.update(self(x), y)
        self.log("val_acc", self.accuracy, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class MNISTData(L.LightningDataModule):
    def __init__(self, root="data", global_batch=256):
        super().__init__()
        self.root, self.global_batch = root, global_batch

    def prepare_data(self):  # on one process of each machine
        MNIST(self.root, train=True, download=True)
        MNIST(self.root, train=False, download=True)

    def setup(self, stage):
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
        self.train_set = MNIST(self.root, train=True, transform=transform)
        self.val_set = MNIST(self.root, train=False, transform=transform)

    def train_dataloader(self):
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        sampler = DistributedSampler(self.val_set, num_replicas=world_size, rank=rank, shuffle=True)
        return DataLoader(self.train_set, batch_size=self.global_batch // world_size, sampler=sampler, num_workers=2)

    def val_dataloader(self):
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        part = Subset(self.val_set, range(rank, len(self.val_set), world_size))
        return DataLoader(part, batch_size=500, num_workers=2)


def main():
    trainer = L.Trainer(
        accelerator="gpu",
        devices=3,
        strategy="ddp",
        max_epochs=5,
        use_distributed_sampler=False,  # the loaders above have their parts already; Lightning still sets the epoch
    )
    trainer.fit(LitClassifier(), datamodule=MNISTData())


if __name__ == "__main__":
    main()
