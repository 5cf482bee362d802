"""DistributedDataParallel and DataParallel around a user's module, with the traps of both closed."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import UserError
from lockstep.parallel.batchnorm import convert_sync_batchnorm, ghost, preserve_buffers
from lockstep.world import World

# torch 2.15 renamed the flag and warns of the old name
_BUFFER_FLAG = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


def parallelize(
    model: nn.Module,
    world: World,
    *,
    strategy: str = "ddp",
    sync_bn: bool = False,
    find_unused_parameters: bool = False,
    devices: list[torch.device] | None = None,
) -> nn.Module:
    """The module that trains `model` on all ranks; in a world of one it is `model` itself.

    Buffers are not broadcast before each forward pass (DDP's default, which costs a collective a step, lets ranks
    differ after the last step and hangs a rank with an empty share): `evaluate` and the training loop average them
    where it matters.

    Args:
        model: on its device already.
        strategy: "ddp", "dp" (nn.DataParallel over `devices`) or "single".
        sync_bn: batch statistics over the global batch.
        find_unused_parameters: as in DistributedDataParallel.

    Raises:
        UserError: for "dp" without two GPUs.
    """
    if sync_bn:
        convert_sync_batchnorm(model, world)
    if strategy == "dp":
        return _data_parallel(model, world, devices)
    if strategy == "single" or world.size == 1:
        return model
    ddp = DistributedDataParallel(
        model,
        device_ids=None if world.device.type == "cpu" else [world.device],
        gradient_as_bucket_view=True,
        # not static_graph: its first backward pass may not be one under no_sync (an internal assertion of torch ends
        # accumulation there), and it saves work only where parameters go unused
        find_unused_parameters=find_unused_parameters,
    )
    # Off only now: as an argument it also kept torch < 2.15 from making the initial buffers rank 0's.
    setattr(ddp, _BUFFER_FLAG, False)
    return ddp


def _data_parallel(model: nn.Module, world: World, devices: list[torch.device] | None) -> nn.Module:
    if world.device.type != "cpu":
        devices = devices or [torch.device(world.device.type, i) for i in range(torch.accelerator.device_count())]
    require_gpus(devices or [world.device])
    return nn.DataParallel(model, device_ids=devices)


def require_gpus(devices: list[torch.device]) -> None:
    """Raise UserError where DataParallel would have nothing to do: without two GPUs."""
    gpus = sum(device.type != "cpu" for device in devices)
    if gpus < 2:
        raise UserError(
            f"--strategy dp needs two GPUs or more, and here {'is one' if gpus else 'there is only the CPU'}: "
            "nn.DataParallel would just call the module",
            "Use --strategy ddp (any number of processes, CPU included) or --strategy single.",
        )


class GradientSync(Protocol):
    """How the gradients of one step's pieces become those of the global batch."""

    average_over: int  # the factor by which `finish` divides summed gradients

    def piece(self, size: int, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a piece of `size` samples."""
        ...

    def finish(self) -> None:
        """After the last piece: every parameter's .grad is the global batch's on return."""
        ...

    def waited_ms(self) -> float | None:
        """Milliseconds per step that this rank stood waiting for the others' gradients; None where nobody can tell."""
        ...


class DataParallelSync:
    """DDP's own all-reduce, during the backward pass of the last piece."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self.average_over = self.ddp.process_group.size() if self.ddp is not None else 1

    def piece(self, size: int, last: bool) -> AbstractContextManager[None]:
        """No all-reduce for all but the last piece; a rank without a sample goes along as a ghost."""
        if size == 0:
            return self._ghost_piece(last)
        # no_sync must cover the forward pass too: DDP decides there whether the backward pass will reduce
        return nullcontext() if last or self.ddp is None else self.ddp.no_sync()

    @contextmanager
    def _ghost_piece(self, last: bool) -> Iterator[None]:
        with ghost(self.model), preserve_buffers(self.model):
            if last or self.ddp is None:
                yield
            else:
                with self.ddp.no_sync():
                    yield

    def finish(self) -> None:
        """Nothing left to do: DDP waits for its buckets at the end of the backward pass."""

    def waited_ms(self) -> float | None:
        """From the end of the backward computation to the last bucket's arrival, by DDP's own clocks, over all steps.

        DDP reads them on the first ten steps and on every hundredth.
        """
        if self.ddp is None:
            return 0.0
        clocks = self.ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time")  # in ns
        if not all(name in clocks for name in names):
            return None
        reduction, hidden = (float(clocks[name]) for name in names)
        return max(0.0, reduction - hidden) / 1e6
