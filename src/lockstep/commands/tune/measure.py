"""How fast a config trains: real steps of its run, on its processes, without evaluation, journal and checkpoints."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from lockstep.config import Config
from lockstep.processes.world import World
from lockstep.training.assemble import Run, assemble, load_data
from lockstep.training.loop import steps
from lockstep.training.state import State

_WARM_UP = 3  # steps; DDP cuts its buckets anew after the first, and the last of an epoch may be a short one
_PACED = 3  # steps that tell how many fit the time
_MOST = 2000


@dataclass(frozen=True)
class Speed:
    """What one start found."""

    images_per_s: float  # over all processes, of the slowest one's time
    loss: float  # of the first step, before anything was trained: the same for choices that compute the same


def measure(world: World, config: Config, seconds: float) -> Speed:
    """Train for so many seconds after a warm-up; all ranks call it together and return the same."""
    load_data(config, world)  # one process of a machine downloads what is missing
    run = assemble(config, world)
    taken = _taken(run)
    samples, first = next(taken)
    losses = world.gather(float(first))
    for _ in range(_WARM_UP - 1 + 2 * config.execution.workers):  # until the loader has found its pace
        next(taken)
    pace, _ = _timed(world, taken, _PACED)
    count = world.largest([min(_MOST, max(_PACED, int(seconds / pace * _PACED)))])[0]
    took, images = _timed(world, taken, count)
    return Speed(images / took, sum(losses) / samples)


def _taken(run: Run) -> Iterator[tuple[int, Tensor]]:
    """Each step's samples over all ranks, and this rank's summed loss, epoch after epoch."""
    state = State()
    while True:
        for _, samples, loss in steps(run, state, lambda _: None):
            assert loss is not None
            yield samples, loss
        state.epochs += 1


def _timed(world: World, taken: Iterator[tuple[int, Tensor]], count: int) -> tuple[float, int]:
    """Seconds of the slowest rank for so many steps, and their images."""
    world.barrier()
    began, images = time.perf_counter(), 0
    for _ in range(count):
        samples, loss = next(taken)
        images += samples
    float(loss)  # waits for the device
    return max(world.gather(time.perf_counter() - began)), images
