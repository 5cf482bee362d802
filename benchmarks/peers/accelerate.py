"""Hugging Face Accelerate around a loop by hand."""

import numpy as np
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from lockstep import Order
from peers.task import Side, Task, image_set, loader, looped, make_model, make_optimizer, tensor_batches


def build(task: Task) -> Side:
    AcceleratorState._reset_state()  # a process compares its steps in fp32 first, and its precision can't be changed
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if task.precision == "bf16" else "no")
    model = make_model(task)
    trained, optimizer = accelerator.prepare(model, make_optimizer(task, model))
    if task.data == "tensors":
        batches = tensor_batches(task)
    else:
        # it hands the ranks whole batches in turn: the order over all ranks, in batches of a rank's share
        order = Order(len(image_set(task)), task.batch, seed=0, drop_last=True)
        batches = iter(accelerator.prepare(loader(task, np.concatenate(list(order.steps(0))))))

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(trained(images), labels))
        optimizer.step()

    return Side(model, looped(step, batches))
