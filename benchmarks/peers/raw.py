"""The loop that one writes by hand, over tensors in memory."""

import itertools
import time

import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from peers.task import Side, Task, autocast, make_model, make_optimizer, tensor_batches


def build(task: Task) -> Side:
    model = make_model(task)
    optimizer, batches, cast = make_optimizer(task, model), tensor_batches(task), autocast(task)
    trained = model
    if task.ranks > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        trained = DistributedDataParallel(model)

    def run(steps: int) -> float:
        began = time.perf_counter()
        for images, labels in itertools.islice(batches, steps):
            optimizer.zero_grad()
            F.cross_entropy(trained(images), labels).backward()
            optimizer.step()
        return time.perf_counter() - began

    def run_cast(steps: int) -> float:
        began = time.perf_counter()
        for images, labels in itertools.islice(batches, steps):
            optimizer.zero_grad()
            with cast():
                loss = F.cross_entropy(trained(images), labels)
            loss.backward()
            optimizer.step()
        return time.perf_counter() - began

    return Side(model, run_cast if task.precision == "bf16" else run)
