"""How the gradients of one step's pieces become those of the global batch: what each way of training has to offer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import LinkConfig
from lockstep.parallel.batchnorm import apart, ghost
from lockstep.parallel.modules import average_buffers, preserved, without_gradients

Reseed = Callable[[int], int]  # seeds the generators that draw for piece i, and returns their seed
Take = Callable[[nn.Module, int], Tensor]  # the forward and backward pass of piece i through that module


class GradientSync:
    """The training step's view of the other ranks; as it stands here, there are none."""

    average_over = 1  # the factor by which the ranks' summed gradients are divided
    at_once = 1  # pieces in threads of this process, where there are several
    exact = False  # pieces are the same on every N, and may be taken in several threads
    link = LinkConfig()  # what it does for a slow link, for the rules of what goes together

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Once, before the first step: the optimizer over the model's parameters."""
        del optimizer

    def cut(self, batch: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """This rank's part of a batch [b, ...] in pieces of these sizes, for `passes`."""
        return [batch] if len(sizes) == 1 else torch.split(batch, list(sizes))

    def passes(self, model: nn.Module, sizes: Sequence[int], reseed: Reseed, take: Take) -> list[Tensor]:
        """Take this rank's pieces of a step through the model, and return what `take` does of each.

        `sizes`: samples of each piece.
        """
        results = []
        for i, size in enumerate(sizes):
            reseed(i)
            with self.piece(size, last=i == len(sizes) - 1):
                results.append(take(model, i))
        return results

    def received(self, parameter: nn.Parameter) -> bool:
        """True where this step's passes gave a parameter a gradient; asked before `finish`."""
        return parameter.grad is not None

    def anywhere(self, flag: bool) -> bool:
        """Whether it is true on any rank, asked once, in the first step: as here, since every rank has a pass."""
        return flag

    def total(self, amounts: Tensor, samples: int, count: int) -> Tensor:
        """The sum over all pieces of the step: of this rank's amounts [pieces], `samples` of the batch's `count`."""
        del samples, count
        return amounts.sum()

    def piece(self, size: int, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a piece of `size` samples."""
        del size, last
        return nullcontext()

    def finish(self) -> None:
        """After the last piece: every parameter's .grad is the global batch's on return."""

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> None:
        """Scale the gradients so that their norm over all parameters is `most` at most."""
        nn.utils.clip_grad_norm_(parameters, most)

    def updated(self, step: int) -> None:
        """After the optimizer's step number `step`, counted from 0."""
        del step

    def left_out(self, step: int) -> None:
        """In place of step number `step`, which no rank takes."""
        del step

    def synchronize(self) -> None:
        """Make weights and buffers the same on all ranks, where they went apart. All ranks call it together."""

    def restart(self) -> None:
        """Weights and optimizer state were replaced: nothing remembered of them holds any longer."""

    def private(self, key: str) -> bool:
        """True for an entry of the optimizer's state that each rank has for itself, between exchanges too."""
        del key
        return False

    def gathered(self) -> AbstractContextManager[None]:
        """Within, rank 0's optimizer holds what a checkpoint needs of all ranks. All call it together."""
        return nullcontext()

    def waited_ms(self) -> float | None:
        """Milliseconds per step that this rank stood waiting for the others' gradients; None where nobody can tell."""
        return 0.0


class BackwardSync(GradientSync, ABC):
    """Gradients come together in the last piece's backward pass; each rank's buffers follow its own share."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.model, self.ranks, self.average_over = model, ranks, ranks
        self.apart = False

    def piece(self, size: int, last: bool) -> AbstractContextManager[None]:
        """A reduction in the last piece alone; a rank without a sample goes along as a ghost."""
        around = self.reducing(last)
        return around if size else ghost_piece(self.model, around)

    def total(self, amounts: Tensor, samples: int, count: int) -> Tensor:
        """By an all-reduce of one number."""
        summed = super().total(amounts, samples, count)
        dist.all_reduce(summed)
        return summed

    @abstractmethod
    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """Around the passes of a piece: the last one's backward reduces, the others keep their gradients."""

    def updated(self, step: int) -> None:
        """Each rank's passes have moved its own buffers."""
        del step
        self.apart = True

    def synchronize(self) -> None:
        """Average the buffers, if there was a step since the last time."""
        if self.apart:
            average_buffers(self.model, self.ranks)
        self.apart = False

    def restart(self) -> None:
        """The buffers were replaced, by the same ones on all ranks."""
        self.apart = False


@contextmanager
def ghost_piece(model: nn.Module, around: AbstractContextManager[None]) -> Iterator[None]:
    """Around the passes of a rank without a sample, whose dummy batch must leave no trace."""
    with ghost(model), preserved(apart(model)), without_gradients(model), around:
        yield
