"""Lockstep as a library: its loader, `parallelize` and `TrainStep` in a user's loop."""

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch.nn.functional as F

import lockstep as ls
from lockstep.config import Execution, Precision
from lockstep.distributed.world import join
from lockstep.training import optimizers
from peers.task import Side, Task, data_dir, dataset, make_model, make_optimizer, optim

_OPEN = ExitStack()  # the process group, until the process ends


@cache
def world(threads: int) -> ls.World:
    """This process's place among those of the environment, as under torchrun."""
    return _OPEN.enter_context(join(Execution(device="cpu", threads=threads)))


def own_precision(task: Task) -> Precision:
    """The task's precision in Lockstep's words: float64 is a model's own affair."""
    return "bf16" if task.precision == "bf16" else "fp32"


def build(task: Task) -> Side:
    here = world(task.threads)
    model = make_model(task)
    trained = ls.parallelize(model, here, batch_norm="local")  # as the other sides have it
    crop: dict[str, Any] = {"crop_padding": 4, "flip": True} if task.net == "cifar10" and not task.plain else {}
    train, _ = ls.loaders(
        dataset(task), here, batch_size=task.batch, seed=0, data_dir=data_dir(task), drop_last=True, **crop
    )
    batches: Iterator[ls.Batch]
    if task.net == "linear":  # in memory before the clock starts, as the other sides have them
        optimizer, batches = make_optimizer(task, model), itertools.cycle(list(train.epoch(0)))
    else:
        optimizer = optimizers.build(model, optim(task), optim(task).lr)
        batches = itertools.chain.from_iterable(train.epochs(1000))
    step = ls.TrainStep(trained, F.cross_entropy, optimizer, precision=own_precision(task))

    def run(steps: int) -> float:
        began = time.perf_counter()
        for batch in itertools.islice(batches, steps):
            step(batch)
        return time.perf_counter() - began

    return Side(model, run)
