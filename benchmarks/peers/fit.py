"""Lockstep's whole training path: order, loader, ledger, journal, progress, heartbeat, all that is on by default.

A timed segment is an epoch of a run of its own; assembling, the evaluation and the last checkpoint are not in it.
"""

import tempfile
import time
from pathlib import Path
from unittest import mock

from torch import nn

from lockstep.config import Config, DataConfig, Execution, ModelConfig
from lockstep.distributed.world import World
from lockstep.training import assemble, loop
from lockstep.training.session import Session
from peers.lockstep import own_precision, world
from peers.task import STEPS_OF_VECTORS, Side, Task, data_dir, dataset, make_model, model_name, optim


def epoch_seconds(config: Config, here: World) -> float:
    """Seconds of a one-epoch run's `train_epoch`, in a folder of its own."""
    found: list[float] = []
    epoch = loop.train_epoch

    def clocked(live: Session) -> None:
        began = time.perf_counter()
        epoch(live)
        found.append(time.perf_counter() - began)

    with (
        tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as folder,
        mock.patch.object(loop, "train_epoch", clocked),
    ):
        (Path(folder) / "weights").mkdir()
        loop.train(config, here, Path(folder))
    return sum(found)


def build(task: Task) -> Side:
    here = world(task.threads)
    model = make_model(task)

    def made(*_: object) -> nn.Module:  # goes on with the weights of the segment before, as the other sides do
        return model

    def run(steps: int) -> float:
        used = steps / STEPS_OF_VECTORS
        config = Config(
            epochs=1,
            batch_size=task.batch,
            precision=own_precision(task),
            data=DataConfig(dataset=dataset(task), fraction=used, drop_last=True),
            model=ModelConfig(model=model_name(task)),
            optim=optim(task),
            execution=Execution(nproc=1, device="cpu", threads=task.threads, data_dir=data_dir(task)),
        )
        with mock.patch.object(assemble, "build_model", made):
            return epoch_seconds(config, here)

    return Side(model, run)
