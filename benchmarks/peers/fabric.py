"""Lightning Fabric around a loop by hand."""

from collections.abc import Iterable
from functools import cache
from typing import Any, cast

import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor

from peers.task import Side, Task, loader, looped, make_model, make_optimizer, tensor_batches

PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}


@cache
def launched(ranks: int, precision: str) -> Fabric:
    fabric = Fabric(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision=PRECISION[precision],  # type: ignore[arg-type]
    )
    fabric.launch()
    return fabric


def build(task: Task) -> Side:
    fabric = launched(task.ranks, task.precision)
    model = make_model(task)
    trained, optimizer = fabric.setup(model, make_optimizer(task, model))
    if task.data == "tensors":
        batches = tensor_batches(task)
    else:
        loaded = fabric.setup_dataloaders(loader(task), use_distributed_sampler=False)
        batches = iter(cast("Iterable[Any]", loaded))

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(trained(images), labels))
        optimizer.step()

    return Side(model, looped(step, batches))
