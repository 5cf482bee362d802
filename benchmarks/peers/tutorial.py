"""The way of the tutorials: per-sample transforms, DataLoader, DistributedSampler, plain DDP, `.item()` a step."""

import numpy as np
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from peers.task import (
    Pair,
    Side,
    Task,
    autocast,
    loader,
    looped,
    make_model,
    make_optimizer,
    sample_set,
    shares,
)

EPOCHS = 20  # of the stream that a DistributedSampler lists in full


class Ordered(Dataset[Pair]):
    """A set in a given order, so that the sampler's ranks (every second sample) get what the other sides' ranks get."""

    def __init__(self, samples: Dataset[Pair], ids: np.ndarray) -> None:
        self.samples, self.ids = samples, ids

    def __len__(self) -> int:
        return EPOCHS * len(self.ids)

    def __getitem__(self, position: int) -> Pair:
        return self.samples[self.ids[position % len(self.ids)]]


def distributed(task: Task) -> DataLoader[Pair]:
    """Each rank's loader, with its part of the order taken by a DistributedSampler."""
    gathered: list[np.ndarray] = [np.empty(0)] * task.ranks
    dist.all_gather_object(gathered, np.concatenate(shares(task)))
    samples = Ordered(sample_set(task), np.stack(gathered, axis=1).reshape(-1))
    workers = task.workers // task.ranks
    return DataLoader(
        samples,
        batch_size=task.mine,
        sampler=DistributedSampler(samples, shuffle=False),
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )


def build(task: Task) -> Side:
    model = make_model(task)
    optimizer, cast = make_optimizer(task, model), autocast(task)
    trained, total = model, [0.0]
    if task.ranks > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        trained = DistributedDataParallel(model)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        with cast():
            loss = F.cross_entropy(trained(images), labels)
        loss.backward()
        optimizer.step()
        total[0] += loss.item()

    return Side(model, looped(step, iter(distributed(task) if task.ranks > 1 else loader(task))))
