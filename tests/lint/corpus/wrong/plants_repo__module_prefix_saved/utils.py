# expect: module-prefix-saved line 74 or 75 or 77 or 86 or 91
"""Process group, metrics and checkpoints."""
import os
import random

import numpy as np
import torch
import torch.distributed as dist


def setup():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    return torch.device("cuda", local)


def teardown():
    dist.destroy_process_group()


def rank():
    return dist.get_rank()


def world_size():
    return dist.get_world_size()


def is_main():
    return rank() == 0


def seed_process(seed):
    """Each rank draws its own augmentations and dropped paths (DDP makes the weights equal)."""
    random.seed(seed + rank())
    np.random.seed(seed + rank())
    torch.manual_seed(seed + rank())


def log(text):
    if is_main():
        print(text, flush=True)


class Meter:
    """A mean over the samples of all ranks; reads nothing back from the device until asked."""

    def __init__(self, device):
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, mean, n):
        self.sums[0] += mean * n
        self.sums[1] += n

    def average(self):
        sums = self.sums.clone()
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()


class Checkpoints:
    def __init__(self, folder, model, optimizer, schedule):
        self.last = os.path.join(folder, "last.pt")
        self.best_file = os.path.join(folder, "best.pt")
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.best = 0.0

    def save(self, epoch, accuracy):
        improved = accuracy > self.best
        self.best = max(self.best, accuracy)
        if not is_main():
            return
        weights = self.model.state_dict()
        torch.save(
            {
                "weights": weights,
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "epoch": epoch,
                "best": self.best,
            },
            self.last,
        )
        if improved:
            torch.save(weights, self.best_file)

    def restore(self):
        """Load the last checkpoint; returns the epoch to go on with."""
        state = torch.load(self.last, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.best = state["best"]
        return state["epoch"] + 1
