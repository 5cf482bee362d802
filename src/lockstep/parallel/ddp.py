"""DistributedDataParallel around a user's module, with its traps closed."""

import inspect
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.parallel.compression import Compression
from lockstep.parallel.sync import GradientSync, ghost_piece
from lockstep.processes.world import World

# torch 2.15 renamed the flag and warns of the old name
_BUFFER_FLAG = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


def distributed(
    model: nn.Module, world: World, *, find_unused_parameters: bool = False, compress: str = "none"
) -> DistributedDataParallel:
    """The model in DistributedDataParallel, over one device or several.

    Buffers are not broadcast before each forward pass (DDP's default, which costs a collective a step, lets ranks
    differ after the last step and hangs a rank with an empty share): `evaluate` and the training loop average them
    where it matters.
    """
    several = len({parameter.device for parameter in model.parameters()}) > 1  # then DDP wants to be told of none
    ddp = DistributedDataParallel(
        model,
        device_ids=None if several or world.device.type == "cpu" else [world.device],
        gradient_as_bucket_view=True,
        # not static_graph: its first backward pass may not be one under no_sync (an internal assertion of torch ends
        # accumulation there), and it saves work only where parameters go unused
        find_unused_parameters=find_unused_parameters,
    )
    # Off only now: as an argument it also kept torch < 2.15 from making the initial buffers rank 0's.
    setattr(ddp, _BUFFER_FLAG, False)
    ddp.compression = Compression(ddp, compress) if compress != "none" else None  # type: ignore[assignment]
    return ddp


class DDPSync(GradientSync):
    """DDP's own all-reduce, during the backward pass of the last piece; nothing for a module that is not DDP."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self.average_over = self.ddp.process_group.size() if self.ddp is not None else 1
        self.compression: Compression | None = getattr(self.ddp, "compression", None)

    def piece(self, size: int, last: bool) -> AbstractContextManager[None]:
        """No all-reduce for all but the last piece; a rank without a sample goes along as a ghost."""
        # no_sync must cover the forward pass too: DDP decides there whether the backward pass will reduce
        around = nullcontext() if last or self.ddp is None else self.ddp.no_sync()
        return around if size else ghost_piece(self.model, around)

    def restart(self) -> None:
        """What PowerSGD kept of earlier gradients belongs to other weights."""
        if self.compression is not None:
            self.compression.forget()

    def waited_ms(self) -> float | None:
        """From the end of the backward computation to the last bucket's arrival, by DDP's own clocks, over all steps.

        DDP reads them on the first ten steps and on every hundredth.
        """
        if self.ddp is None:  # DataParallel copies within its passes, where no clock stands
            return None if isinstance(self.model, nn.DataParallel) else 0.0
        clocks = self.ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time")  # in ns
        if not all(name in clocks for name in names):
            return None
        reduction, hidden = (float(clocks[name]) for name in names)
        return max(0.0, reduction - hidden) / 1e6
