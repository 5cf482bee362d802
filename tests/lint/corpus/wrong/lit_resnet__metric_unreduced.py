# expect: metric-unreduced line 26
import argparse

import lightning.pytorch as pl
import torch.distributed as dist
import torchvision
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn, optim
from torch.utils.data import DataLoader
from torchvision import transforms


class ImageClassifier(pl.LightningModule):
    def __init__(self, classes, lr):
        super().__init__()
        self.save_hyperparameters()
        self.model = torchvision.models.resnet50(num_classes=classes)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = self.loss(self(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(images))
        return loss

    def test_step(self, batch, batch_idx):
        images, labels = batch
        hits = (self(images).argmax(1) == labels).float().mean()
        self.log("test_acc", hits, batch_size=len(images))

    def configure_optimizers(self):
        optimizer = optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=1e-4)
        scheduler = optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def folder(path, train):
    first = transforms.RandomResizedCrop(224) if train else transforms.CenterCrop(224)
    last = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return torchvision.datasets.ImageFolder(path, transforms.Compose([first, transforms.ToTensor(), last]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1024, help="per optimizer step, on all GPUs")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--resume", default=None, help="a checkpoint, or 'last'")
    args = parser.parse_args()

    per_gpu = args.batch_size // (args.gpus * args.accumulate)
    train_set = folder(args.train, train=True)
    train_loader = DataLoader(train_set, batch_size=per_gpu, shuffle=True, num_workers=8, drop_last=True)
    model = ImageClassifier(len(train_set.classes), args.lr)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=args.gpus,
        strategy="ddp",
        sync_batchnorm=True,
        precision="16-mixed",
        max_epochs=90,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(save_last=True), LearningRateMonitor()],
    )
    trainer.fit(model, train_loader, ckpt_path=args.resume)

    # Tested by one process alone: a distributed sampler would repeat images to make the parts equal.
    if dist.is_initialized():
        dist.destroy_process_group()
    if trainer.is_global_zero:
        test_loader = DataLoader(folder(args.test, train=False), batch_size=256, num_workers=8)
        pl.Trainer(accelerator="gpu", devices=1, num_nodes=1, logger=False).test(model, test_loader)


if __name__ == "__main__":
    main()
