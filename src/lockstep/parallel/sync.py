"""How the gradients of one step's pieces become those of the global batch: what each way of training has to offer."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from lockstep.parallel.batchnorm import ghost, preserve_buffers
from lockstep.processes.world import World


class GradientSync:
    """The training step's view of the other ranks; as it stands here, there are none."""

    average_over = 1  # the factor by which the ranks' summed gradients are divided

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Once, before the first step: the optimizer over the model's parameters."""
        del optimizer

    def piece(self, size: int, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a piece of `size` samples."""
        del size, last
        return nullcontext()

    def finish(self) -> None:
        """After the last piece: every parameter's .grad is the global batch's on return."""

    def updated(self, step: int) -> None:
        """After the optimizer's step number `step`, counted from 0."""
        del step

    def settle(self) -> None:
        """Have all ranks hold the same weights, where they went apart. All ranks call it together."""

    def restart(self) -> None:
        """Weights and optimizer state were replaced: nothing remembered of them holds any longer."""

    def waited_ms(self) -> float | None:
        """Milliseconds per step that this rank stood waiting for the others' gradients; None where nobody can tell."""
        return 0.0


@contextmanager
def ghost_piece(model: nn.Module, around: AbstractContextManager[None]) -> Iterator[None]:
    """Around the passes of a rank without a sample, whose dummy batch must leave no trace."""
    with ghost(model), preserve_buffers(model), around:
        yield


def copy_from_first(model: nn.Module, world: World) -> None:
    """Make rank 0's parameters and buffers everyone's, where a user's model draws its own on each rank."""
    if world.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)
