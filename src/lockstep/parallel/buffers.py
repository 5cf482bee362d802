"""Buffers that training moves, the same on all ranks: what each rank's samples did to them, put together.

Batch normalisation looks after its own. Of the others most never move; those that do are found on some steps, and from
then on synchronised after every pass, because the next one may use them. Floats become the mean of the ranks', each by
its samples. A whole number that all ranks have moved alike, as a counter of passes, stays as it is; else its changes
are added, as a count of samples wants it. A truth value flips where it does on any rank. A rank without a sample takes
what the others hold.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.parallel.batchnorm import GroupBatchNorm, batch_norms
from lockstep.parallel.module_state import as_real, flattened, unequal, write_flat


def average_buffers(model: nn.Module, ranks: int, share: float | None = None) -> None:
    """Make the buffers of so many ranks the same: floats become their mean, all others rank 0's. All call it together.

    Means are float64, taken of the differences to rank 0's: what is equal on all ranks keeps its bits, infinities too.

    Args:
        share: this rank's part of the samples behind them (None: all ranks' are alike).
    """
    if ranks == 1:
        return
    groups = {id(b) for m in model.modules() if isinstance(m, GroupBatchNorm) for b in m.buffers(recurse=False)}
    each = [(as_real(b), 1 / ranks if share is None or id(b) in groups else share) for b in model.buffers()]
    if floats := [(b, weight) for b, weight in each if b.is_floating_point()]:
        tensors = [b for b, _ in floats]
        mine = flattened(tensors, torch.float64)
        first = mine.clone()
        dist.broadcast(first, 0)
        weights = torch.cat([mine.new_full((b.numel(),), weight) for b, weight in floats])
        beyond = torch.where(unequal(mine, first) & (weights > 0), (mine - first) * weights, 0.0)
        dist.all_reduce(beyond)
        write_flat(torch.where(beyond == 0, first, first + beyond), tensors)
    if others := [b for b, _ in each if not b.is_floating_point()]:
        flat = flattened(others, torch.int64)
        dist.broadcast(flat, 0)
        write_flat(flat, others)


class MovingBuffers:
    """The buffers of a model that its passes move, without batch normalisation's.

    They are looked up by module and name: forward may put another tensor in a buffer's place.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.ranks = ranks
        norms = set(batch_norms(model))
        self.places = [
            (module, name)
            for module in model.modules()
            if module not in norms
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.moving: list[int] = []  # of the places; the same on all ranks
        self.added: dict[int, Tensor | bool] = {}  # place of whole numbers -> bool []: whether its changes are added up
        self.watching = False
        self.before: list[Tensor] = []

    def begin(self) -> None:
        """Before a pass."""
        self.before = [self._held(i).clone() for i in (range(len(self.places)) if self.watching else self.moving)]

    def _held(self, place: int) -> Tensor:
        module, name = self.places[place]
        held = module._buffers[name]
        return torch.empty(0) if held is None else as_real(held.detach())

    @torch.no_grad()
    def synchronize(self, samples: int) -> None:
        """After a pass of so many samples of this rank; all ranks call it together."""
        before = self.before
        if self.watching and self.places:
            moved = [int(samples > 0 and _moved(was, self._held(i))) for i, was in enumerate(before)]
            flags = torch.tensor(moved)
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            self.moving = sorted({*self.moving, *flags.nonzero().flatten().tolist()})
            before = [before[i] for i in self.moving]
        if not self.moving:
            return
        now = [self._held(i) for i in self.moving]
        floats = [held for held in now if held.is_floating_point()]
        pairs = [(was, held) for was, held in zip(before, now, strict=True) if not held.is_floating_point()]
        parts = [flattened(floats, torch.float64).view(torch.int64)] if floats else []
        parts += [flattened([each[i] for each in pairs], torch.int64) for i in (0, 1) if pairs]
        mine = torch.cat([*parts, torch.full((1,), samples, device=now[0].device)])
        rows = mine.new_empty(self.ranks, len(mine))
        dist.all_gather(list(rows.unbind()), mine)
        size, counts = sum(held.numel() for held in floats), rows[:, -1:]  # samples of each rank
        if floats:
            write_flat(_mean(rows[:, :size].contiguous().view(torch.float64), counts), floats)
        if pairs:
            sizes = [held.numel() for _, held in pairs]
            columns = zip(*(torch.split(part, sizes, 1) for part in rows[:, size:-1].chunk(2, 1)), strict=True)
            places = [i for i, held in zip(self.moving, now, strict=True) if not held.is_floating_point()]
            for place, (was, after), (_, held) in zip(places, columns, pairs, strict=True):
                truth = held.dtype == torch.bool
                total, self.added[place] = _counted(was, after - was, counts, truth, self.added.get(place, False))
                held.copy_(total.view(held.shape))


def _moved(before: Tensor, now: Tensor) -> bool:
    """Whether a buffer has other values. One that is another kind of tensor now can't be put together."""
    return before.shape == now.shape and before.dtype == now.dtype and bool(unequal(before, now).any())


def put_together(
    before: Tensor, after: Tensor, counts: Tensor, added: Tensor | bool = False
) -> tuple[Tensor, Tensor | bool]:
    """A buffer [n] after a pass whose samples several took, and whether its changes are added up.

    Args:
        before, after: [1, n] and [parts, n].
        counts: samples of each part, [parts, 1].
        added: whether changes were added up before.
    """
    if after.is_floating_point():
        return _mean(after.double(), counts).to(after.dtype), False
    moved, added = _counted(before.long(), after.long() - before.long(), counts, after.dtype == torch.bool, added)
    return moved.to(after.dtype), added


def _counted(
    before: Tensor, change: Tensor, counts: Tensor, truth: bool, added: Tensor | bool
) -> tuple[Tensor, Tensor | bool]:
    """Whole numbers [n] after a pass, from each rank's before it and how it has changed them; whether it is added up.

    `added`: whether changes were added up before; then they are for good, since equal shares would hide it.
    """
    there, first = counts > 0, change[0]
    if truth:
        return torch.where((there & (change != 0)).any(0), 1 - before[0], before[0]), False
    unlike = (there & (change != first)).any()
    by_sample = ((counts > 1) & (change != 0) & (change % counts.clamp(min=1) == 0)).any()
    added = unlike | by_sample | added
    summed = torch.where(there, change, 0).sum(0)
    # a place in a ring falls back to its start, which no sum does
    returned = (before[0] + summed < 0) & (before >= 0).all(0) & (before + change >= 0).all(0)
    return before[0] + torch.where(added & ~returned, summed, first), added


def _mean(rows: Tensor, counts: Tensor) -> Tensor:
    """The mean of rows [ranks, n] weighed by samples [ranks, 1]; what is equal keeps its bits. Rank 0 has samples."""
    first = rows[0]
    beyond = torch.where(
        unequal(rows, first) & (counts > 0), (rows - first) * (counts.double() / counts.sum()), 0.0
    ).sum(0)
    return torch.where(beyond == 0, first, first + beyond)
