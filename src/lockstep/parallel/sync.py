"""How the gradients of a step's shards become the global batch's: what each strategy offers to a training step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lockstep.config import CommConfig
from lockstep.data.order import Shard
from lockstep.parallel.batchnorm import apart, ghost
from lockstep.parallel.buffers import MovingBuffers, average_buffers
from lockstep.parallel.module_state import preserved_buffers, without_gradients

Reseed = Callable[[int], object]  # seeds the generators for the pass of shard i
Take = Callable[[nn.Module, int], Tensor]  # forward and backward of shard i through that module


class GradientSync:
    """The training step's view of the other ranks; as it stands here, there are none. Gradients are summed."""

    ranks = 1
    at_once = 1  # shards in threads of this process, where there are several
    comparable = True  # what a step computes is to be the same on any number of ranks
    exact = False  # shards are the same on every N, and may be taken in several threads
    sequential = False  # they are taken in one thread all the same
    overlap: bool | None = None  # whether exact mode's reductions start during backward; None until a step has shown it
    skips_unused = False  # parameters that get no gradient are accepted
    link = CommConfig()  # what it does for a slow link, for the rules of what goes together

    def cut(self, batch: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """This rank's part of a batch [b, ...] in shards of these sizes, for `passes`."""
        return [batch] if len(sizes) == 1 else torch.split(batch, list(sizes))

    def passes(self, model: nn.Module, shards: Sequence[Shard], reseed: Reseed, take: Take) -> list[Tensor]:
        """Take this rank's shards of a step through the model, and return what `take` does of each."""
        results = []
        for i, shard in enumerate(shards):
            reseed(i)
            with self.around(shard, last=i == len(shards) - 1):
                results.append(take(model, i))
        return results

    def without_gradient(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those that got none in this step's passes; asked before `finish`."""
        return [p for p in parameters if p.grad is None]

    def anywhere(self, flag: bool) -> bool:
        """Whether it is true on any rank, asked once, in the first step: as here, since every rank has a pass."""
        return flag

    def total(self, amounts: Tensor, samples: int, count: int) -> Tensor:
        """The sum over all shards of the step: of this rank's amounts [shards], `samples` of the batch's `count`."""
        del samples, count
        return amounts.sum()

    def gather(self, values: Any, samples: int, rows: int) -> Any:
        """All ranks' tensors [b, ...] in `values`, nested as they like: those of the whole micro-batch, [members, ...].

        Backward brings this rank's rows their gradient. `samples`: of this rank, among so many `rows` that it passes.
        """
        del samples, rows
        return values

    def take_parameters(self) -> None:
        """The model may have other parameters than before. All ranks call it together."""

    def around(self, shard: Shard, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a shard."""
        del shard, last
        return nullcontext()

    def finish(self) -> None:
        """After the last shard: every parameter's .grad is the global batch's on return."""

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Around the passes of a step that is only looked at: afterwards gradients are summed over the ranks."""
        yield
        self.finish()

    def watch_buffers(self) -> None:
        """Before a step: look for buffers that its passes move, and keep those the same on all ranks from then on."""

    def synchronize(self) -> None:
        """Make buffers the same on all ranks, where they went apart. All ranks call it together."""

    def restart(self) -> None:
        """Weights and optimizer state were replaced: nothing remembered of them holds any longer."""

    def waited_ms(self) -> float | None:
        """Milliseconds per step that this rank stood waiting for the others' gradients; None where nobody can tell."""
        return 0.0


class BackwardSync(GradientSync, ABC):
    """Gradients come together in the last shard's backward pass."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.model, self.ranks = model, ranks
        self.buffers = MovingBuffers(model, ranks)
        self.taken = self.count = 0  # samples of this rank, and of all, since buffers were averaged

    @contextmanager
    def around(self, shard: Shard, last: bool) -> Iterator[None]:
        """A reduction in the last shard alone; a rank without a sample goes along as a ghost."""
        around = self.reducing(last)
        self.buffers.begin()
        with around if shard.size else ghost_pass(self.model, around):
            yield
        self.buffers.synchronize(shard.size)
        self.buffers.watching &= not last
        self.taken += shard.size
        self.count += shard.members

    def gather(self, values: Any, samples: int, rows: int) -> Any:
        """By an all-gather of as many rows from each rank as the one with most samples has."""
        counts = torch.zeros(self.ranks, dtype=torch.int64)
        counts[dist.get_rank()] = samples
        dist.all_reduce(counts)
        return tree_map(
            lambda value: (
                _Gathered.apply(value, counts.tolist())
                if isinstance(value, Tensor) and value.ndim and len(value) == rows
                else value
            ),
            values,
        )

    def total(self, amounts: Tensor, samples: int, count: int) -> Tensor:
        """By an all-reduce of one number."""
        summed = super().total(amounts, samples, count)
        dist.all_reduce(summed)
        return summed

    @abstractmethod
    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """Around the passes of a shard: the last one's backward reduces, the others keep their gradients."""

    def watch_buffers(self) -> None:
        """In the next step's passes."""
        self.buffers.watching = True

    def synchronize(self) -> None:
        """Average by samples the buffers that followed this rank's own, as those of local batch norms."""
        if self.count:
            average_buffers(self.model, self.ranks, self.taken / self.count)
        self.restart()

    def restart(self) -> None:
        """The buffers are the same on all ranks."""
        self.taken = self.count = 0


class _Gathered(torch.autograd.Function):
    """The first rows of every rank's tensor, one rank after the other."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, counts: list[int]) -> Tensor:
        rank, most = dist.get_rank(), max(counts)
        ctx.shape, ctx.mine = mine.shape, slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        padded = mine.new_zeros(most, *mine.shape[1:])
        padded[: counts[rank]] = mine[: counts[rank]]
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded)
        return torch.cat([rows[:count] for rows, count in zip(everyone, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient[ctx.mine]
        return torch.cat([own, own.new_zeros(ctx.shape[0] - len(own), *ctx.shape[1:])]), None


@contextmanager
def ghost_pass(model: nn.Module, around: AbstractContextManager[None]) -> Iterator[None]:
    """Around the passes of a rank without a sample, whose dummy batch must leave no trace."""
    with ghost(model), preserved_buffers(apart(model)), without_gradients(model), around:
        yield
