"""Lightning: a LightningModule and one endless `Trainer.fit`, which finds the next batch when its turn comes."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from peers.fabric import PRECISION
from peers.task import Pair, Side, Task, loader, make_model, make_optimizer, tensor_batches

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):  # type: ignore[misc]
    """The usual module of its tutorials."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model, self.made = model, optimizer

    def training_step(self, batch: Pair, _: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.made


class Gate(Iterable[Pair]):
    """Hands out batches for as many steps as are asked for; the clock runs from one request to its last step's end."""

    def __init__(self, batches: Iterator[Pair], ask: Callable[[], int | None], answer: Callable[[float], None]) -> None:
        self.batches, self.ask, self.answer = batches, ask, answer

    def __len__(self) -> int:
        return 1 << 40  # known, else it would fetch a batch ahead to find the end

    def __iter__(self) -> Iterator[Pair]:
        while (steps := self.ask()) is not None:
            began = time.perf_counter()
            yield from itertools.islice(self.batches, steps)
            self.answer(time.perf_counter() - began)


def build(task: Task) -> Side:
    model = make_model(task)
    optimizer = make_optimizer(task, model)
    batches = tensor_batches(task) if task.data == "tensors" else iter(loader(task))

    def trainer(**limits: Any) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=task.ranks,
            strategy="ddp" if task.ranks > 1 else "auto",
            precision=PRECISION[task.precision],  # type: ignore[arg-type]
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **limits,
        )

    def run(steps: int) -> float:
        began = time.perf_counter()
        trainer(max_steps=steps).fit(Module(model, optimizer), Gate(batches, lambda: steps, lambda _: None))
        return time.perf_counter() - began

    def serve(ask: Callable[[], int | None], answer: Callable[[float], None]) -> None:
        trainer(max_epochs=1).fit(Module(model, optimizer), Gate(batches, ask, answer))

    return Side(model, run, serve)
