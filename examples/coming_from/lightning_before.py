"""The same training with Lightning: `python lightning_before.py 2`. accelerate_after.py is its script by Lockstep."""

import sys

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

import lockstep as ls
from net import digits, digits_net


class Shares:
    """This rank's part of each batch, in the order that accelerate_after.py has. Usually Lightning's own sampler."""

    epoch = 0
    order = ls.Order(1437, batch_size=64, seed=0, drop_last=True)

    def __init__(self):
        self.sampler = self  # whose set_epoch Lightning calls

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        for ids in self.order.steps(self.epoch):
            yield torch.from_numpy(ids).tensor_split(ranks)[rank].tolist()

    def __len__(self):
        return 1437 // 64


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = digits_net()

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu", devices=int(sys.argv[1]), strategy="ddp", max_epochs=3, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(digits(), batch_sampler=Shares()))
