"""The next batch, prepared on a side stream of the accelerator while the present one is trained on."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from lockstep.processes.devices import has_streams

Tensors = tuple[Tensor, ...]


@cache  # one for each device: the allocator keeps what it freed apart by stream, and every other one would add its own
def _side(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _current(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def prefetch(batches: Iterator[Tensors], device: torch.device) -> Iterator[Tensors]:
    """The same batches, each taken from `batches` one step early, its work on a stream of its own.

    So the copies and kernels of batch k + 1 are in the device's queues before step k, and run beside it even where the
    step ends by waiting for the device, as fp16's scaler does. Without streams the batches just pass through.

    Args:
        batches: puts the work that makes a batch on the current stream of `device`.
        device: where the batches are.
    """
    if not has_streams(device):
        yield from batches
        return
    side = _side(device)
    side.wait_stream(_current(device))  # what batches are made of may be on its way to the device still

    def prepare() -> tuple[Tensors, torch.Event] | None:
        with side:
            batch = next(batches, None)
            return None if batch is None else (batch, side.record_event())

    coming = prepare()
    while coming is not None:
        (batch, ready), coming = coming, prepare()
        stream = _current(device)
        stream.wait_event(ready)
        for tensor in batch:
            # allocated on the side stream, which could else give its memory to a later batch while this one is read
            tensor.record_stream(stream)
        yield batch
