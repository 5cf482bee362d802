"""What a process does in a step of its own: real steps of the recipe with DDP's buckets, and without an all-reduce."""

import itertools
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.commands.forecast.link import probe, stolen_core_s
from lockstep.commands.forecast.model import Timeline
from lockstep.config import Config
from lockstep.data.loaders import TrainLoader
from lockstep.data.sources import ArraySet
from lockstep.parallel.ddp import DDPSync
from lockstep.parallel.strategy import parallelize
from lockstep.processes.world import World
from lockstep.training.assemble import Run, assemble, load_data, train_loader
from lockstep.training.loop import steps
from lockstep.training.state import State

_ROUNDS = 3  # sizes take turns, so that a slow moment of the machine meets them all
_WARM_UP = 3  # steps; DDP cuts its buckets anew after the first
_FEWEST, _MOST = 2, 100  # steps of a size in a round
_RATED_S = 0.2  # for the loader alone, at least


@dataclass(frozen=True)
class Job:
    """What to measure in one group of processes."""

    configs: tuple[Config, ...]  # one process's part for each size, as a run of its own; the largest first
    reduces: bool  # as one of several processes: with DDP's buckets
    seconds: float  # for each size
    link: bool  # measure the all-reduce, too


@dataclass(frozen=True)
class Measured:
    """What a group found."""

    steps: dict[int, Timeline]  # by images of a micro-batch; the slowest rank's
    loader: dict[int, float]  # images/s of one process's loader alone
    prefetched: bool
    buckets: tuple[int, ...]  # bytes, in order of completion
    blocking: tuple[int, ...]  # bytes of each small all-reduce that the computation waits for, of one step
    probes: list[tuple[int, float, float]]  # (processes, bytes, seconds) of all-reduces alone
    stolen_core_s: float  # core seconds taken from the computation for each byte that a process sends
    device: str


class _Clock:
    """Moments on the device's own time line: reading them is what waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, list[Any]()

    def mark(self) -> None:
        if self.device.type == "cpu":
            self.marks.append(time.perf_counter())
        else:
            event = torch.Event(self.device, enable_timing=True)
            event.record(torch.accelerator.current_stream(self.device))
            self.marks.append(event)

    def read(self) -> list[float]:
        """Seconds since the first mark; forgets them."""
        marks, self.marks = self.marks, []
        if self.device.type == "cpu":
            return [mark - marks[0] for mark in marks]
        torch.accelerator.synchronize(self.device)
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]


class _WatchedSync(DDPSync):
    """DDP without its all-reduce: notes when each bucket is complete, and when the backward pass is over."""

    def __init__(self, model: torch.nn.Module, clock: _Clock) -> None:
        super().__init__(model)
        self.clock, self.average_over = clock, 1
        self.buckets: list[int] = []
        if self.ddp is not None:
            self.ddp.register_comm_hook(self, _WatchedSync.complete)

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


def measure(world: World, job: Job) -> Measured:
    """Measure on this rank; all ranks of the group call it together and return the same."""
    load_data(job.configs[0], world)  # one process of a machine downloads what is missing
    alone = World.single(world.device)
    run = assemble(job.configs[0], alone)
    clock = _Clock(world.device)
    loaders = {_piece(config): _loader(config, run, alone) for config in job.configs}
    images, execution = run.train.images, job.configs[0].execution
    resident = isinstance(images, ArraySet) and execution.loader != "streaming"
    prefetched = world.device.type != "cpu" or (not resident and execution.workers > 0)
    lonely = job.reduces and world.size == 1
    if lonely:  # DDP wants a group, if only of one
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        # a size of 2 makes it DDP in a group of one, too
        wrapped = parallelize(run.model, replace(world, size=2)) if job.reduces else run.model
        sync = run.step.sync = _WatchedSync(wrapped, clock)
        run.step.model = wrapped
        moments = {size: list[list[float]]() for size in loaders}
        filling = 1 + 2 * job.configs[0].execution.workers * prefetched  # steps until the loader has found its pace
        for loader in loaders.values():
            _steps(run, loader, clock, _WARM_UP)
        counts = {size: _agree(world, job.seconds / _ROUNDS, run, loader, clock) for size, loader in loaders.items()}
        for _, (size, loader) in itertools.product(range(_ROUNDS), loaders.items()):
            world.barrier()
            moments[size] += _steps(run, loader, clock, counts[size] + filling)[filling:]
        sync.buckets.clear()
        _steps(run, loaders[max(loaders)], clock, 1)
        buckets = tuple(sync.buckets)
        probes = probe(world, buckets) if job.link else []

        def compute(count: int) -> None:
            _steps(run, loaders[max(loaders)], clock, count)

        stolen = stolen_core_s(world, buckets, compute) if job.link else 0.0
    finally:
        if lonely:
            dist.destroy_process_group()
    everyone = world.gather(moments)
    return Measured(
        {size: _slowest([each[size] for each in everyone]) for size in loaders},
        {size: min(world.gather(_rate(loader, clock))) for size, loader in loaders.items()},
        prefetched,
        buckets,
        _blocking(run, job.configs[0]),
        probes,
        stolen,
        world.device.type,
    )


def _piece(config: Config) -> int:
    return config.batch_size // config.accumulate


def _loader(config: Config, run: Run, world: World) -> TrainLoader:
    """A loader of another batch size over the run's set; they share one set of workers."""
    loader = train_loader(config, run.train.images, world)
    loader.read = run.train.read
    return loader


def _steps(run: Run, loader: TrainLoader, clock: _Clock, count: int) -> list[list[float]]:
    """The moments of each of so many steps: loaded, each bucket complete, backward over, all done.

    A short last batch is trained on and left out.
    """
    run.train, found = loader, list[list[Any]]()
    full = min(loader.order.batch_size, loader.order.samples_per_epoch)
    while len(found) < count:
        clock.mark()
        for _, samples, _ in steps(run, State(), lambda _: clock.mark()):
            clock.mark()
            if samples == full:
                found.append(clock.marks)
            clock.marks = []
            if len(found) == count:
                break
            clock.mark()
        clock.marks = []
    moments = []
    for clock.marks in found:
        moments.append(clock.read()[1:])
    return moments


def _agree(world: World, seconds: float, run: Run, loader: TrainLoader, clock: _Clock) -> int:
    """How many steps take so long, the same number on all ranks."""
    spent = statistics.median(moments[-1] for moments in _steps(run, loader, clock, _FEWEST))
    return min(_MOST, max(_FEWEST, world.largest([int(seconds / spent)])[0]))


def _slowest(ranks: list[list[list[float]]]) -> Timeline:
    """The timeline of a step that waits for its slowest rank: the median over the steps of the largest over ranks."""
    moments = np.median(np.max(np.asarray(ranks), axis=0), axis=0).tolist()  # [ranks][steps][moments] -> [moments]
    load, *rest = moments
    *ready, backward, total = (moment - load for moment in rest)
    return Timeline(load, tuple(ready), backward, total)


def _rate(loader: TrainLoader, clock: _Clock) -> float:
    """Images/s of the loader with nobody else at work in this process."""
    batches = itertools.chain.from_iterable(loader.epoch(0) for _ in itertools.count())
    list(itertools.islice(batches, _WARM_UP))
    began, images = time.perf_counter(), 0
    clock.mark()
    for number, batch in enumerate(batches, 1):  # several may be made in one go: only a time over many is one
        images += batch.count
        if number >= _FEWEST and time.perf_counter() - began >= _RATED_S:
            break
    clock.mark()
    return images / clock.read()[1]


def _blocking(run: Run, config: Config) -> tuple[int, ...]:
    """Sums of the batch statistics, forward and backward, of every synchronised layer and micro-batch: bytes."""
    if not config.model.sync_bn:
        return ()
    sizes = [2 * m.num_features * 4 for m in run.model.modules() if isinstance(m, _BatchNorm)]
    return tuple(size for size in sizes for _ in range(2 * config.accumulate))
