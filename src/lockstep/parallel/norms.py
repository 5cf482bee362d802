"""The batch normalisations of a model: what they take their statistics over, and what they are told of a step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.pieces import Piece
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import StepBatchNorm, SyncBatchNorm, local_batch_norms
from lockstep.processes.world import World

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class GroupBatchNorm(StepBatchNorm):
    """Batch normalisation of each `group` consecutive samples by themselves, as that many on a GPU would be.

    Where a rank's passes are whole groups nothing has to be communicated, and no cut of the batch can be seen. The
    running statistics move once a step, at `end_step`, by the mean of all groups' statistics: what a process for each
    group would have after averaging its buffers.
    """

    group: int
    used: int = 0  # times that the layer was called in this pass
    waiting: list[Tensor]  # for each of these times: sums over the step's groups so far of mean and variance [2, C]

    def normalise(self, x: Tensor) -> Tensor:
        """x by its groups' statistics; a loop, of which the fused kernel takes a group at a time."""
        fold, rest = divmod(len(x), self.rows or len(x))
        if rest:
            raise ValueError(
                f"--batch-norm groups: a batch of {self.rows} became {len(x)}, so samples are not to be told"
            )
        parts = torch.split(x, self.group * max(fold, 1))
        if self.running_mean is None:
            return torch.cat([self._plain(part, None) for part in parts])
        found = self.running_mean.new_zeros(len(parts), 2, self.num_features)  # mean and unbiased variance
        y = torch.cat([self._plain(part, kept) for part, kept in zip(parts, found, strict=True)])
        sums = torch.zeros_like(found[0]) if self.ghost else found.sum(0)
        if not self.rows:
            self.track(*(sums / len(parts)))
        elif self.used < len(self.waiting):
            self.waiting[self.used] = self.waiting[self.used] + sums
        else:
            self.waiting.append(sums)
        self.used += 1
        return y

    def _plain(self, x: Tensor, kept: Tensor | None) -> Tensor:
        mean, variance = (None, None) if kept is None else kept
        return F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)


class _Activated(StepBatchNorm):
    """With the dropout and activation that timm puts into its normalisation layers."""

    drop: nn.Module
    act: nn.Module

    def finish(self, y: Tensor) -> Tensor:
        return self.act(self.drop(y))  # type: ignore[no-any-return]


class _SyncBatchNormAct(_Activated, SyncBatchNorm):
    pass


class _GroupBatchNormAct(_Activated, GroupBatchNorm):
    pass


def convert_sync_batchnorm(module: nn.Module, world: World, skip_unknown: bool = False) -> nn.Module:
    """Make every batch normalisation in `module` a SyncBatchNorm, in place: objects, parameters and hooks stay.

    Raises:
        UserError: for a subclass with a forward of its own, whose meaning can't be known, unless they are skipped.
    """
    for layer in local_batch_norms(module):
        if (own := _own_forward(layer)) and skip_unknown:
            continue
        _become(layer, _SyncBatchNormAct if own is None else SyncBatchNorm, own, "global")
        layer.world = world  # type: ignore[assignment]
    return module


def convert_group_batchnorm(module: nn.Module, group: int) -> nn.Module:
    """As `convert_sync_batchnorm`: a GroupBatchNorm of so many samples of each."""
    for layer in local_batch_norms(module):
        own = _own_forward(layer)
        _become(layer, _GroupBatchNormAct if own is None else GroupBatchNorm, own, f"groups:{group}")
        layer.group, layer.waiting = group, []  # type: ignore[assignment]
    return module


def _own_forward(layer: _BatchNorm) -> bool | None:
    """True where a subclass computes what nobody can know; None for timm's, which add a known end to torch's."""
    if type(layer) in _PLAIN or type(layer).forward is _BatchNorm.forward:
        return False
    return None if hasattr(layer, "drop") and hasattr(layer, "act") else True


def _become(layer: _BatchNorm, kind: type[StepBatchNorm], own_forward: bool | None, how: str) -> None:
    """Change a layer's class, and nothing else of it."""
    if own_forward:
        name = type(layer).__name__
        raise UserError(f"--batch-norm {how} can't convert {name}: its forward is its own", "Use --batch-norm local.")
    layer.__class__ = kind


@contextmanager
def announced(layers: Sequence[StepBatchNorm], piece: Piece, rows: int, count: int) -> Iterator[None]:
    """Around the forward pass of `rows` samples: a rank's piece of a global batch of `count`, or a dummy for it.

    Raises:
        UserError: for a piece that is not of whole groups.
    """
    for layer in layers:
        layer.rows, layer.members = rows, piece.members
        if isinstance(layer, GroupBatchNorm):
            layer.used = 0
            within = piece.rows.start % layer.group or (piece.rows.stop % layer.group and piece.rows.stop < count)
            if piece.size and within:
                raise UserError(
                    f"samples {piece.rows.start} to {piece.rows.stop} of a batch are not whole groups of {layer.group}",
                    f'Make the loader by lockstep.loaders(..., batch_norm="groups:{layer.group}").',
                )
    try:
        yield
    finally:
        for layer in layers:
            layer.rows = layer.members = 0


def end_step(layers: Sequence[StepBatchNorm], count: int, ranks: int) -> None:
    """Once a step, after all passes of its `count` samples: groups' running statistics move.

    Each rank's moves by its own groups' part of the mean, times the ranks by which `average_buffers` divides.
    """
    for layer in layers:
        if isinstance(layer, GroupBatchNorm) and layer.running_mean is not None and layer.track_running_stats:
            waiting, layer.waiting = layer.waiting, []
            share = ranks / -(-count // layer.group)
            for mean, variance in (sums * share for sums in waiting):
                layer.track(mean, variance)
