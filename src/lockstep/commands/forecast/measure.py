"""What a process does in a step of its own: real steps of the recipe with DDP's buckets, and without an all-reduce."""

import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket, HashStore

from lockstep.commands.forecast.link import probe, stolen_core_s
from lockstep.commands.forecast.model import Curve, Reductions, Timeline
from lockstep.config import Config
from lockstep.data.arrays import ArraySet
from lockstep.data.loaders import TrainLoader
from lockstep.parallel.batchnorm import batch_norms
from lockstep.parallel.ddp import LockstepDDP
from lockstep.parallel.sync import GradientSync
from lockstep.processes.listening import loopback_alone
from lockstep.processes.world import World
from lockstep.training.assemble import Run, assemble, load_data, train_loader
from lockstep.training.loop import steps
from lockstep.training.state import State

_ROUNDS = 3  # sizes take turns, so that a slow moment of the machine meets them all
_WARM_UP = 3  # steps; DDP cuts its buckets anew after the first
_FEWEST, _MOST = 2, 100  # steps of a size in a round
_RATED_S = 0.2  # for the loader alone, at least


@dataclass(frozen=True)
class Measured:
    """What a group found."""

    curve: Curve  # of the slowest rank
    loader: dict[int, float]  # images/s of one process's loader alone, by images of a micro-batch
    prefetched: bool
    sends: Reductions  # of one step
    probes: list[tuple[int, float, float]]  # (processes, bytes, seconds) of all-reduces alone
    stolen_core_s: float  # core seconds taken from the computation for each byte that a process sends
    others_cores: float = 0.0  # of this machine's, that others kept busy meanwhile


class _Clock:
    """Moments on the device's own time line: reading them is what waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, list[Any]()

    def start(self) -> None:
        """Begin a new list of marks here."""
        self.marks = []
        self.mark()

    def mark(self) -> None:
        """A moment."""
        if self.device.type == "cpu":
            self.marks.append(time.perf_counter())
        else:
            event = torch.Event(self.device, enable_timing=True)
            event.record(torch.accelerator.current_stream(self.device))
            self.marks.append(event)

    def read(self, marks: list[Any]) -> list[float]:
        """Seconds from the first mark to each of the others."""
        if self.device.type == "cpu":
            return [mark - marks[0] for mark in marks[1:]]
        torch.accelerator.synchronize(self.device)
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks[1:]]


class _WatchedSync(GradientSync):
    """DDP without its all-reduce: notes when each bucket is complete, and when the backward pass is over."""

    def __init__(self, model: torch.nn.Module, clock: _Clock) -> None:
        self.clock, self.buckets = clock, list[int]()
        self.ddp = model if isinstance(model, LockstepDDP) else None
        if self.ddp is not None:
            self.ddp.register_comm_hook(self, _WatchedSync.complete)

    def piece(self, size: int, last: bool) -> AbstractContextManager[None]:
        """As DDP's: buckets are filled in the last piece."""
        del size
        return nullcontext() if last or self.ddp is None else self.ddp.no_sync()

    def complete(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """In place of the all-reduce."""
        buffer = bucket.buffer()
        self.clock.mark()
        self.buckets.append(buffer.numel() * buffer.element_size())
        devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def finish(self) -> None:
        """After the backward pass."""
        self.clock.mark()


def measure(world: World, configs: Sequence[Config], reduces: bool, seconds: float, link: bool) -> Measured:
    """Measure on this rank; all ranks of the group call it together and return the same.

    Args:
        world: the group.
        configs: one process's part for each size, as a run of its own; the largest first.
        reduces: each as one of several processes: with DDP's buckets.
        seconds: for each size.
        link: measure the all-reduce, too.
    """
    config, execution = configs[0], configs[0].execution
    load_data(config, world)  # one process of a machine downloads what is missing
    alone, clock = World.single(world.device), _Clock(world.device)
    run = assemble(config, alone)
    loaders = {each.batch_size // each.accumulate: train_loader(each, run.train.images, alone) for each in configs}
    for loader in loaders.values():
        loader.read = run.train.read  # they share one set of workers
    resident = isinstance(run.train.images, ArraySet) and execution.loader != "streaming"
    prefetched = world.device.type != "cpu" or (not resident and execution.workers > 0)
    filling = 1 + 2 * execution.workers * prefetched  # steps until the loader has found its pace

    def take(size: int, count: int) -> list[list[float]]:
        return _steps(run, loaders[size], clock, count)

    lonely = reduces and world.size == 1
    if lonely:  # DDP wants a group, if only of one
        with loopback_alone():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        if reduces:  # in a group of one, too
            run.step.model = LockstepDDP(run.model, world, config.model.find_unused_parameters)
        sync = run.step.sync = _WatchedSync(run.step.model, clock)
        for size in loaders:
            take(size, _WARM_UP)
        counts = {size: _agree(world, seconds / _ROUNDS, take(size, _FEWEST)) for size in loaders}
        moments = {size: list[list[float]]() for size in loaders}
        for _, size in itertools.product(range(_ROUNDS), loaders):
            world.barrier()
            moments[size] += take(size, counts[size] + filling)[filling:]
        sync.buckets.clear()
        take(max(loaders), 1)
        buckets = tuple(sync.buckets)
        probes = probe(world, buckets) if link else []
        stolen = stolen_core_s(world, buckets, partial(take, max(loaders))) if link else 0.0
    finally:
        if lonely:
            dist.destroy_process_group()
    everyone = [dict(each) for each in world.gather(list(moments.items()))]  # JSON's keys are texts
    return Measured(
        Curve({size: _slowest([each[size] for each in everyone]) for size in loaders}),
        {size: min(world.gather(_rate(loader, clock))) for size, loader in loaders.items()},
        prefetched,
        Reductions(buckets, _blocking(run, config)),
        probes,
        stolen,
    )


def _steps(run: Run, loader: TrainLoader, clock: _Clock, count: int) -> list[list[float]]:
    """The moments of each of so many steps: loaded, each bucket complete, backward over, all done.

    A short last batch is trained on and left out.
    """
    run.train, found = loader, list[list[Any]]()
    full = min(loader.order.batch_size, loader.order.samples_per_epoch)
    while len(found) < count:
        clock.start()
        for _, samples, _ in steps(run, State(), lambda _: clock.mark()):
            clock.mark()
            if samples == full:
                found.append(clock.marks)
            if len(found) == count:
                break
            clock.start()
    return list(map(clock.read, found))


def _agree(world: World, seconds: float, steps: list[list[float]]) -> int:
    """How many steps such as these take so long, the same number on all ranks."""
    spent = statistics.median(moments[-1] for moments in steps)
    return min(_MOST, max(_FEWEST, world.largest([int(seconds / spent)])[0]))


def _slowest(ranks: list[list[list[float]]]) -> Timeline:
    """The timeline of a step that waits for its slowest rank: the median over the steps of the largest over ranks."""
    load, *rest = np.median(np.max(ranks, axis=0), axis=0).tolist()  # [ranks][steps][moments] -> [moments]
    *ready, backward, total = (moment - load for moment in rest)
    return Timeline(load, tuple(ready), backward, total)


def _rate(loader: TrainLoader, clock: _Clock) -> float:
    """Images/s of the loader with nobody else at work in this process."""
    batches = itertools.chain.from_iterable(loader.epoch(0) for _ in itertools.count())
    list(itertools.islice(batches, _WARM_UP))
    began, images = time.perf_counter(), 0
    clock.start()
    for number, batch in enumerate(batches, 1):  # several may be made in one go: only a time over many is one
        images += batch.count
        if number >= _FEWEST and time.perf_counter() - began >= _RATED_S:
            break
    clock.mark()
    return images / clock.read(clock.marks)[0]


def _blocking(run: Run, config: Config) -> tuple[int, ...]:
    """Sums of the batch statistics, forward and backward, of every synchronised layer and micro-batch: bytes."""
    if config.statistics(2) != "global":
        return ()
    sizes = [2 * layer.num_features * 4 for layer in batch_norms(run.model)]
    return tuple(size for size in sizes for _ in range(2 * config.accumulate))
