"""What makes a process's kernels give the same bits again: its settings, and what it refuses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.distributed.devices import device_name
from lockstep.distributed.world import World
from lockstep.errors import UserError


def configure(world: World) -> None:
    """Make this process's kernels repeatable, and refuse a world whose ranks would round differently.

    Sets one intra-op thread (kernels split their sums by them) and deterministic algorithms; no TF32, no autotuning.

    Raises:
        UserError: where devices or torch versions differ between ranks.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(True)
    # it would cost a write of every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    everyone = world.gather(rounding(world.device))
    for what, first in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs[what] != first:
                raise UserError(
                    f"--exact: {what} is {first} on rank 0 and {theirs[what]} on rank {rank}, which round differently",
                    "Run on machines of one kind with the same software.",
                )


def rounding(device: torch.device) -> dict[str, str | int]:
    """What decides how kernels round beside their input; two runs agree to the bit only where this does."""
    return {"torch": torch.__version__, "device": device_name(device), "CPU threads": torch.get_num_threads()}


@contextmanager
def repeatable(slices: int) -> Iterator[None]:
    """Around a slice's passes: name an operator that can't be repeated."""
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise UserError(
            f"--exact {slices}: {str(error).splitlines()[0]}",
            "Replace that operator in the model, or train without --exact.",
        ) from error


_COLLECTIVES = ("c10d", "_c10d_functional")  # the namespaces of their operators


class Collectives(TorchDispatchMode):
    """Within, it is noted whether a collective is called. `refused`, in exact mode: each process would call it once for
    each of its own slices."""

    def __init__(self, refused: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused, self.called = refused, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the operator returns."""
        collective = func.namespace in _COLLECTIVES
        self.called |= collective
        if collective and self.refused:
            raise UserError(
                f"--exact: forward or backward calls a collective, {func.name().rpartition('::')[2].strip('_')}",
                "Leave it out, or train without --exact: a slice passes through the model by itself.",
            )
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def own_storage(model: nn.Module) -> None:
    """Move parameters and buffers whose memory is not torch's, as numpy's, to where kernels find it aligned."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() % 64:
            tensor.data = tensor.detach().clone()
