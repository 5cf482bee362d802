"""What the link between the processes takes: all-reduces alone, and beside a computation."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from lockstep.commands.forecast.model import moved
from lockstep.processes.world import World

# bytes, beside the buckets' own sizes; little in between, where bursts that a slow link lets through would pass for it
_PROBES = (4 << 10, 1 << 20, 4 << 20)
_PROBE_S, _SAMPLE_S, _MOST_SAMPLES = 0.4, 0.02, 50
_LONG_S = 0.5  # all-reduces that take longer are timed once


def _timed(world: World, work: Callable[[], object]) -> float:
    """Seconds of the slowest rank, from a common start."""
    synchronize: Callable[[], object] = torch.accelerator.synchronize if world.device.type != "cpu" else lambda: None
    synchronize()
    world.barrier()
    began = time.perf_counter()
    work()
    synchronize()
    return float(max(world.gather(time.perf_counter() - began)))


def probe(world: World, buckets: tuple[int, ...]) -> list[tuple[int, float, float]]:
    """All-reduces alone, one at a time: (processes, bytes, seconds) of each size, medians."""
    found = []
    for nbytes in sorted({*_PROBES, *buckets}):
        tensor = torch.zeros(nbytes // 4, device=world.device)

        def reduce(times: int, tensor: torch.Tensor = tensor) -> None:
            for _ in range(times):
                dist.all_reduce(tensor)

        _timed(world, partial(reduce, 1))  # connections and buffers
        first = _timed(world, partial(reduce, 1))  # the same on all ranks, as what follows from it
        at_once = max(1, int(_SAMPLE_S / first))  # so that leaving the barrier together matters little
        samples = min(_MOST_SAMPLES, max(1, int(_PROBE_S / (first * at_once))))
        times = [_timed(world, partial(reduce, at_once)) / at_once for _ in range(samples)]
        found.append((world.size, float(nbytes), statistics.median(times if at_once > 1 else [first, *times])))
    return found


def stolen_core_s(world: World, buckets: tuple[int, ...], compute: Callable[[int], object]) -> float:
    """Core seconds of the computation that go into each byte sent beside it.

    Steps without communication and all-reduces of the same buckets are timed alone and at once; what the two together
    take more than the longer one is what could not be hidden.

    Args:
        world: two processes or more.
        buckets: bytes of each all-reduce of a step.
        compute: takes so many steps.
    """
    tensors = [torch.zeros(nbytes // 4, device=world.device) for nbytes in buckets]

    def both(times: int, count: int) -> None:
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(times) for tensor in tensors]
        compute(count)
        for work in works:
            work.wait()

    once = min(_timed(world, partial(both, 1, 0)) for _ in range(2))
    step = _timed(world, partial(both, 0, 4)) / 4
    count = max(4, int(2 * once / step) + 1)  # the same on all ranks, as both times are
    times = max(1, int(0.5 * count * step / once))
    losses = []
    for _ in range(3 if once < _LONG_S else 1):
        alone = [_timed(world, partial(both, *parts)) for parts in ((times, 0), (0, count))]
        lost = _timed(world, partial(both, times, count)) - max(alone)
        losses.append(min(max(0.0, lost), min(alone)))
    sent = times * moved(world.size, sum(buckets))
    return statistics.median(losses) / sent * torch.get_num_threads()
