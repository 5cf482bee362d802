# expect: none
import os

import torch
import torch.distributed as dist

from .runner import Hook


class ScheduleHook(Hook):
    def __init__(self, schedule):
        self.schedule = schedule

    def after_epoch(self, runner):
        self.schedule.step()


class EvalHook(Hook):
    def __init__(self, loader):
        self.loader = loader

    @torch.no_grad()
    def after_epoch(self, runner):
        net = runner.model.module
        net.eval()
        hits = torch.zeros(2, device="cuda")
        for images, labels in self.loader:
            labels = labels.cuda(non_blocking=True)
            hits[0] += (net(images.cuda(non_blocking=True)).argmax(1) == labels).sum()
            hits[1] += labels.numel()
        dist.all_reduce(hits)
        runner.metrics["top1"] = (hits[0] / hits[1]).item()


class LogHook(Hook):
    """Collects the loss on the device; every so often its mean over ranks and steps is printed."""

    def __init__(self, every):
        self.every = every
        self.steps = 0
        self.total = torch.zeros((), device="cuda")

    def after_iter(self, runner):
        self.total += runner.loss
        self.steps += 1
        if self.steps == self.every:
            mean = self.total / self.every
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            self.total.zero_()
            self.steps = 0
            if dist.get_rank() == 0:
                print(f"epoch {runner.epoch} iter {runner.iter} loss {mean.item():.4f}", flush=True)

    def after_epoch(self, runner):
        if dist.get_rank() == 0:
            print(f"epoch {runner.epoch} done, top1 {runner.metrics['top1']:.4f}", flush=True)


class CheckpointHook(Hook):
    def __init__(self, folder, schedule):
        self.folder = folder
        self.schedule = schedule

    def after_epoch(self, runner):
        if dist.get_rank() != 0:
            return
        os.makedirs(self.folder, exist_ok=True)
        torch.save({
            "model": runner.model.module.state_dict(),
            "optimizer": runner.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "epoch": runner.epoch,
            "iter": runner.iter,
        }, os.path.join(self.folder, "last.pth"))
