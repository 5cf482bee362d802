"""Local SGD: ranks take steps on their own shares alone, and average their weights every H steps.

On links where an all-reduce takes longer than a step, H steps cost one exchange (Stich, "Local SGD converges fast and
communicates little", 2019). What is averaged are weights, buffers and the optimizer's floating-point state, so after an
exchange the ranks hold the same and a checkpoint needs nothing of one rank's own; where the optimizer's state is
private a checkpoint holds that of every rank. With an outer step the average is not taken but gone towards: the way
from the last common weights to the average is the gradient of an SGD with Nesterov momentum (Douillard et al., "DiLoCo:
distributed low-communication training of language models", 2023).

What it gives up of the laws: between two exchanges each rank follows its own share, so the number of processes changes
what is learned. Order, ledger and evaluation stay as they are, and a resumed run is the one that went through.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import LinkConfig
from lockstep.parallel.modules import average_buffers, copy_from_first, flattened, write_flat
from lockstep.parallel.sharded import part_of
from lockstep.parallel.sync import GradientSync, ghost_piece
from lockstep.processes.world import World

OUTER = "outer_momentum"  # in the optimizer's state, so that it is saved and restored with it
_COMMON = ("step", OUTER)  # the same on all ranks
OF_RANKS = " of all ranks"  # [ranks, ...] beside an entry of the optimizer's state, in a checkpoint
_AT_ONCE = 1 << 24  # elements that are averaged together: enough to hide latency, 64 MiB of memory beside the model


class LocalSync(GradientSync):
    """No exchange of gradients; an exchange of weights after every `every`-th step.

    Args:
        model: the bare module, the same on all ranks; this makes rank 0's weights and buffers everyone's.
        every: H, in steps of the run.
        outer_lr, outer_momentum: of the outer step; 1 and 0 are the plain average.
        inner_state: "averaged", or "private": the optimizer's state stays each rank's own.

    Weights differ between ranks until `synchronize` or the next exchange.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        every: int,
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        inner_state: Literal["averaged", "private"] = "averaged",
    ) -> None:
        self.link = LinkConfig(
            sync_every=every, outer_lr=outer_lr, outer_momentum=outer_momentum, inner_state=inner_state
        )
        self.model, self.world, self.every = model, world, every
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        # a rank's summed loss over its own share of the batch is its mean, as long as shares are equal; the weights of
        # uneven ones keep every sample's weight the same in the average
        self.average_over = world.size
        self.alone = 0  # steps since the ranks held the same
        self.steps, self.waited = 0, 0.0
        copy_from_first(model, world)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer whose parameters and state are exchanged."""
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.restart()

    def piece(self, size: int, last: bool) -> AbstractContextManager[None]:
        """Nobody waits for a rank without a sample; its gradients are zeros, so that its optimizer goes on."""
        del last
        return nullcontext() if size else ghost_piece(self.model, nullcontext())

    def total(self, amounts: Tensor, samples: int, count: int) -> Tensor:
        """As if the other ranks' were like this one's, of which it knows nothing."""
        return amounts.sum() * (count / samples) if samples else amounts.sum() + count

    @property
    def _has_outer_step(self) -> bool:
        return (self.outer_lr, self.outer_momentum) != (1.0, 0.0)

    def restart(self) -> None:
        """The weights are common again: these are where the next outer step starts from."""
        self.alone = 0
        self.common = [p.detach().clone() for p in self.parameters] if self._has_outer_step else []

    def updated(self, step: int) -> None:
        """Exchange after every H-th step of the run, whatever step it was resumed at."""
        self.alone += 1
        self.steps += 1
        self.left_out(step)

    def left_out(self, step: int) -> None:
        """The exchange is due by the number of the step, whatever became of its batch."""
        if (step + 1) % self.every == 0:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange now, unless the ranks hold the same already. All ranks call it together."""
        if not self.alone:
            return
        began = time.perf_counter()
        state = [] if self.link.inner_state == "private" else [value for _, _, value in _inner(self.optimizer)]
        _average([*self.parameters, *state], self.world)
        average_buffers(self.model, self.world.size)
        if self._has_outer_step:
            self._step_outer()
        self.waited += time.perf_counter() - began
        self.restart()

    def _step_outer(self) -> None:
        """SGD with Nesterov momentum, as torch has it, on the gradient `common - average`."""
        for p, common in zip(self.parameters, self.common, strict=True):
            gradient = common - p
            momentum = self.outer_momentum
            if momentum:
                state = self.optimizer.state[p]
                if OUTER not in state:
                    state[OUTER] = torch.zeros_like(p)
                buffer = state[OUTER].mul_(momentum).add_(gradient)
                gradient = gradient + momentum * buffer
            p.copy_(common - self.outer_lr * gradient)

    def private(self, key: str) -> bool:
        """True for the inner optimizer's state where it is not averaged."""
        return self.link.inner_state == "private" and key not in _COMMON

    @contextmanager
    @torch.no_grad()
    def gathered(self) -> Iterator[None]:
        """N sets of the optimizer's state on rank 0 meanwhile, where it is private."""
        own = _inner(self.optimizer) if self.link.inner_state == "private" else []
        for p, key, value in own:
            rows = [torch.empty_like(value) for _ in range(self.world.size)] if self.world.rank == 0 else None
            if self.world.size > 1:
                dist.gather(value, rows)
            if rows is not None:
                self.optimizer.state[p][key + OF_RANKS] = torch.stack(rows if self.world.size > 1 else [value])
        try:
            yield
        finally:
            for p, key, _ in own:
                self.optimizer.state[p].pop(key + OF_RANKS, None)

    def waited_ms(self) -> float | None:
        """The mean over the steps since the last call. A GPU's host does not wait, so there nobody can tell."""
        steps, waited, self.steps, self.waited = self.steps, self.waited, 0, 0.0
        return None if self.world.device.type != "cpu" else 1e3 * waited / max(1, steps)


def _inner(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, str, Tensor]]:
    """(parameter, key, value) of what an inner optimizer keeps in floating point, in one order on all ranks."""
    return [
        (p, key, value)
        for group in optimizer.param_groups
        for p in group["params"]
        for key, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor) and value.is_floating_point() and key not in _COMMON
    ]


@torch.no_grad()
def take_own(optimizer: torch.optim.Optimizer, world: World, private: bool) -> None:
    """After a checkpoint of private states was read: each rank gets its own.

    On another number of ranks, or where states are no longer private, it is their mean.
    """
    for p, key, rows in _inner(optimizer):
        if key.endswith(OF_RANKS):
            del optimizer.state[p][key]
            mine = rows[world.rank] if private and len(rows) == world.size else rows.mean(0)
            live = optimizer.state[p][key.removesuffix(OF_RANKS)]
            live.copy_(part_of(mine, live))


def _average(tensors: list[Tensor], world: World) -> None:
    """Replace each tensor by its mean over the ranks, which gives every rank the same bits."""
    if world.size == 1:
        return
    group: list[Tensor] = []
    for tensor, following in zip(tensors, [*tensors[1:], None], strict=True):
        group.append(tensor)
        full = sum(t.numel() for t in group) >= _AT_ONCE
        if following is None or full or (following.dtype, following.device) != (tensor.dtype, tensor.device):
            flat = flattened(group, tensor.dtype)
            write_flat(world.sum(flat).div_(world.size), group)
            group = []
