"""PyTorch-Ignite: an Engine, with its own supervised step where the precision is fp32."""

import time

import ignite.distributed as idist
import torch.nn.functional as F
from ignite.engine import Engine, create_supervised_trainer

from peers.task import Pair, Side, Task, autocast, loader, make_model, make_optimizer, tensor_batches


def build(task: Task) -> Side:
    model = make_model(task)
    if task.ranks > 1 and idist.backend() is None:
        idist.initialize("gloo")
    trained = idist.auto_model(model)
    optimizer, cast = idist.auto_optim(make_optimizer(task, model)), autocast(task)

    def update(_: Engine, batch: Pair) -> float:
        optimizer.zero_grad()
        with cast():
            loss = F.cross_entropy(trained(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()  # as Ignite's own step does

    if task.precision != "bf16":
        engine = create_supervised_trainer(trained, optimizer, F.cross_entropy)
    else:
        engine = Engine(update)
    batches = tensor_batches(task) if task.data == "tensors" else iter(loader(task))

    def run(steps: int) -> float:
        began = time.perf_counter()
        engine.run(batches, max_epochs=1, epoch_length=steps)
        return time.perf_counter() - began

    return Side(model, run)
