# expect: scaler-not-saved line 93 or 23 or 96 or 100 or 103
"""The training engine."""

import contextlib
import os

import torch
import torch.nn.functional as F
from torch import nn

from utils import World, make_logger, sum_over_ranks


class Engine:
    def __init__(self, model, optimizer, scheduler, train_loader, val_loader, settings, world: World):
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.settings = settings
        self.world = world
        self.scaler = torch.amp.GradScaler("cuda")
        self.log = make_logger(world)
        self.first_epoch = 0
        self.best_accuracy = 0.0

    def _sync_context(self, last: bool):
        return contextlib.nullcontext() if last else self.model.no_sync()

    def _forward(self, net, images, labels, reduction="mean"):
        images = images.to(self.world.device, non_blocking=True)
        labels = labels.to(self.world.device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = net(images)
            loss = F.cross_entropy(logits, labels, reduction=reduction)
        return logits, labels, loss

    def _update(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.optim.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()

    def train_epoch(self, epoch: int) -> float:
        self.model.train()
        self.train_loader.sampler.set_epoch(epoch)
        accumulation = self.settings.optim.accumulation
        n_batches = len(self.train_loader)
        totals = torch.zeros(2, device=self.world.device)
        for i, (images, labels) in enumerate(self.train_loader):
            start = i - i % accumulation
            window = min(accumulation, n_batches - start)
            last = i + 1 == start + window
            with self._sync_context(last):
                _, _, loss = self._forward(self.model, images, labels)
                self.scaler.scale(loss / window).backward()
            totals[0] += loss.detach() * len(images)
            totals[1] += len(images)
            if last:
                self._update()
        loss_sum, count = sum_over_ranks(totals)
        return loss_sum / count

    @torch.inference_mode()
    def evaluate(self):
        net = self.model.module
        net.eval()
        totals = torch.zeros(3, device=self.world.device)
        for images, labels in self.val_loader:
            logits, labels, loss = self._forward(net, images, labels, reduction="sum")
            totals[0] += loss.float()
            totals[1] += (logits.argmax(dim=1) == labels).sum()
            totals[2] += len(labels)
        loss_sum, correct, count = sum_over_ranks(totals)
        return loss_sum / count, correct / count

    def fit(self):
        for epoch in range(self.first_epoch, self.settings.optim.epochs):
            train_loss = self.train_epoch(epoch)
            val_loss, accuracy = self.evaluate()
            self.log.info("epoch %d train %.4f val %.4f accuracy %.4f", epoch, train_loss, val_loss, accuracy)
            if accuracy > self.best_accuracy:
                self.best_accuracy = accuracy
                self.save("best.pt", epoch)
            self.save("last.pt", epoch)

    def save(self, name: str, epoch: int):
        if not self.world.is_main:
            return
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": epoch,
            "best_accuracy": self.best_accuracy,
        }
        torch.save(state, os.path.join(self.settings.out_dir, name))

    def resume(self, path: str):
        state = torch.load(path, map_location=self.world.device, weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.first_epoch = state["epoch"] + 1
        self.best_accuracy = state["best_accuracy"]
