"""DistributedDataParallel around a user's module, with its traps closed."""

import inspect
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.parallel.compression import compress_gradients
from lockstep.parallel.sync import BackwardSync
from lockstep.processes.world import World

# torch 2.15 renamed the flag and warns of the old name
_BUFFER_FLAG = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class LockstepDDP(DistributedDataParallel):
    """DistributedDataParallel over one device or several, as Lockstep needs it.

    Buffers are not broadcast before each forward pass (DDP's default, which costs a collective a step, lets ranks
    differ after the last step and hangs a rank with an empty share): `evaluate` and the training loop average them
    where it matters.
    """

    def __init__(
        self, model: nn.Module, world: World, find_unused_parameters: bool = False, compress: str = "none"
    ) -> None:
        several = len({parameter.device for parameter in model.parameters()}) > 1  # then DDP takes no device_ids
        super().__init__(
            model,
            device_ids=None if several or world.device.type == "cpu" else [world.device],
            gradient_as_bucket_view=True,
            # not static_graph: its first backward pass may not be one under no_sync (an internal assertion of torch
            # ends accumulation there), and it saves work only where parameters go unused
            find_unused_parameters=find_unused_parameters,
        )
        # Off only now: as an argument it also kept torch < 2.15 from making the initial buffers rank 0's.
        setattr(self, _BUFFER_FLAG, False)
        self.powersgd = compress_gradients(self, compress)


class DDPSync(BackwardSync):
    """DDP's own all-reduce."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp, ddp.process_group.size())
        self.ddp = ddp

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """no_sync must cover the forward pass too: DDP decides there whether the backward pass will reduce."""
        return nullcontext() if last else self.ddp.no_sync()

    def restart(self) -> None:
        """What PowerSGD kept of earlier gradients belongs to other weights."""
        super().restart()
        if isinstance(self.ddp, LockstepDDP) and self.ddp.powersgd is not None:
            self.ddp.powersgd.forget()

    def waited_ms(self) -> float | None:
        """From the end of the backward computation to the last bucket's arrival, by DDP's own clocks, over all steps.

        DDP reads them on the first ten steps and on every hundredth.
        """
        clocks = self.ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time")  # in ns
        if not all(name in clocks for name in names):
            return None
        reduction, hidden = (float(clocks[name]) for name in names)
        return max(0.0, reduction - hidden) / 1e6
