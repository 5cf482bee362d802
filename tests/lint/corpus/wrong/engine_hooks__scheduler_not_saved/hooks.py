# expect: scheduler-not-saved line 43 or 33 or 36 or 37 or 48
import os

import torch
import torch.distributed as dist

from core import Hook


class EpochShuffle(Hook):
    def __init__(self, sampler):
        self.sampler = sampler

    def before_epoch(self, loop):
        self.sampler.set_epoch(loop.epoch)


class Printer(Hook):
    def after_epoch(self, loop):
        if dist.get_rank() == 0:
            line = " ".join(f"{k}={v:.4f}" for k, v in loop.metrics.items())
            print(f"epoch {loop.epoch}/{loop.epochs} {line}", flush=True)


class Saver(Hook):
    def __init__(self, folder):
        self.folder = folder
        self.path = os.path.join(folder, "state.pth")

    def before_run(self, loop):
        if not os.path.exists(self.path):
            return
        state = torch.load(
            self.path, map_location="cpu", weights_only=True)
        loop.model.module.load_state_dict(state["model"])
        loop.opt.load_state_dict(state["opt"])
        loop.epoch = state["done"]

    def after_epoch(self, loop):
        if dist.get_rank() != 0:
            return
        os.makedirs(self.folder, exist_ok=True)
        state = {
            "model": loop.model.module.state_dict(),
            "opt": loop.opt.state_dict(),
            "done": loop.epoch,
        }
        torch.save(state, self.path + ".part")
        os.replace(self.path + ".part", self.path)
