"""Batch normalisation over the global batch, or over groups of it, on any device.

torch's SyncBatchNorm refuses CPU tensors in training once a process group exists; this one needs only collectives.
Ranks' means and sums of squared deviations combine by the formula of Chan, Golub and LeVeque ("Updating formulae and a
pairwise algorithm for computing sample variances", 1979), so nothing large cancels. A rank's loss is its samples' part
of the global loss, so sums over ranks of dy and dy (x - mean) are those of one process with the whole batch.

On CUDA a rank's own samples pass through the fused operators of torch's SyncBatchNorm: one pass over x for the
statistics where the plain ones take three, and two in backward where they take nine.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.order import Shard
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.module_state import replaced

Finish = Callable[[Tensor, Tensor], Tensor]  # (sums over all ranks [2, C], count over all ranks []) -> d_x


def fused(x: Tensor) -> bool:
    """Whether torch has the fused operators for a tensor's device."""
    return x.device.type == "cuda"


def channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions to reduce over, and the shape in which [C] broadcasts over x."""
    return [0, *range(2, x.ndim)], [-1, *(1 for _ in range(2, x.ndim))]


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [C] and sum of squared deviations [C] of x [b, C, ...], float32 at least."""
    dims, shape = channels(x)
    if fused(x):
        mean, r = torch.batch_norm_stats(_dense(x), 0.0)  # r = 1 / sqrt(variance + 0), or 0 where there is no variance
        return mean, torch.where(r == 0, 0.0, r.square().reciprocal()) * (x.numel() // x.shape[1])
    mean = x.mean(dims, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    return mean, (x - mean.view(shape)).square_().sum(dims)  # two passes: several times faster than var_mean on a CPU


def backward(dy: Tensor, x: Tensor, mean: Tensor, r: Tensor, weight: Tensor | None) -> tuple[Tensor, Finish]:
    """The sums of dy and of dy (x - mean) [2, C] over this rank's samples, and what makes d_x of those of all ranks.

    Ioffe and Szegedy, "Batch normalization", 2015, with m the global count and both sums over all ranks:

    dx = weight r (dy - sum(dy) / m - (x - mean) r^2 sum(dy (x - mean)) / m),  r = 1 / sqrt(variance + eps).
    """
    weight = None if weight is None else weight.to(mean.dtype)
    if fused(x):
        dy, x = _dense(dy), _dense(x)
        sums = torch.stack(torch.batch_norm_backward_reduce(dy, x, mean, r, weight, True, False, False)[:2])

        def finish_fused(total: Tensor, count: Tensor) -> Tensor:
            parts = *total.unbind(), count.view(1).to(torch.int32)
            d_x: Tensor = torch.batch_norm_backward_elemt(dy, x, mean, r, weight, *parts)
            return d_x

        return sums, finish_fused
    dims, shape = channels(x)
    dy = dy.to(mean.dtype)
    centred = x.to(mean.dtype) - mean.view(shape)

    def finish(total: Tensor, count: Tensor) -> Tensor:
        sum_dy, sum_dy_xmu = total / count
        gain = r if weight is None else r * weight
        slope, offset = -gain * r * r * sum_dy_xmu, -gain * sum_dy
        return centred.mul_(slope.view(shape)).add_(offset.view(shape)).addcmul_(dy, gain.view(shape))

    return torch.stack([dy.sum(dims), (dy * centred).sum(dims)]), finish


def _dense(x: Tensor) -> Tensor:
    """As the fused operators take it: contiguous, in either order."""
    either = x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    return x if either else x.contiguous()


_ONE_VALUE = "Expected more than 1 value per channel when training"  # as torch's own batch norm says it


class StepBatchNorm(_BatchNorm):
    """A batch normalisation of [b, C, ...] that knows which part of a step passes through it.

    In evaluation it is torch's own. A pass that nobody announces by `announce` is a batch of its own.
    """

    ghost: bool = False  # what passes is a dummy's, and counts nowhere
    alone: bool = False  # what passes is a whole batch, without other ranks
    rows: int = 0  # samples that pass, 0 where nobody said
    members: int = 0  # samples of the micro-batch that they belong to, over all ranks
    activates: bool = False  # it is one of timm's, which hold a dropout and an activation too
    joins: tuple[type, ...] = ()  # the classes of a layer that was another one before
    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, C, ...] -> the same shape and dtype."""
        self._check_input_dim(x)
        y = self.normalise(x) if self.training and not self.alone else _BatchNorm.forward(self, x)
        return self.act(self.drop(y)) if self.activates else y

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By the classes that its own is made of, which no module holds."""
        return (_empty, self.joins, vars(self)) if self.joins else super().__reduce_ex__(protocol)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected [batch, {self.num_features}, ...], got {list(input.shape)}")

    @abstractmethod
    def normalise(self, x: Tensor) -> Tensor:
        """x normalised by the statistics of training."""

    def track(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards a batch's."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # .data: as torch's own, which may pass several times before backward, they don't count as written
        for running, new in ((self.running_mean.data, mean), (self.running_var.data, variance)):
            new = new.to(running.dtype)
            if self.momentum is not None:
                running.lerp_(new, self.momentum)
            else:  # the average of all batches; the count stays on the device, where `.item()` would wait for it
                running.add_((new - running) / self.num_batches_tracked)


class SyncBatchNorm(StepBatchNorm):
    """Batch normalisation of [b, C, ...] whose training statistics are those of all ranks' samples together.

    Every rank has to run every training forward and backward. A rank without samples runs a dummy batch with `ghost`
    set: it is normalised by the others' statistics and adds nothing to them, nor to any gradient. Evaluation is local.
    Statistics are float32 at least; the running variance is unbiased by the global count.
    """

    world: World
    watcher: Any = None  # a GivenStatistics that notes calls

    def normalise(self, x: Tensor) -> Tensor:
        """x by the statistics of all ranks' samples; raises ValueError, on all alike, where they are a single one."""
        if self.rows and x.numel() // self.num_features * self.members // self.rows < 2:
            raise ValueError(f"{_ONE_VALUE}, got {self.members} sample(s) of size {list(x.shape[1:])} over all ranks")
        with torch.no_grad():
            mean, squares, count, copies = _global_statistics(x, self.world, self.ghost, in_step=bool(self.rows))
            variance = squares / count
            if self.track_running_stats:
                self.track(mean, squares / (count - copies).clamp(min=1))
            r = torch.rsqrt(variance + self.eps)
            call = None if self.watcher is None else self.watcher.of_all_ranks(mean, variance, r, count, self.momentum)
        running = self.running_mean, self.running_var
        y: Tensor = Normalise.apply(
            x, self.weight, self.bias, mean, variance, r, count, self.eps, self.world, self.ghost, call, *running
        )
        return y


def without_ranks() -> AbstractContextManager[None]:
    """Within, what passes through a SyncBatchNorm is a whole batch, and no other rank is asked."""
    return replaced(SyncBatchNorm, alone=True)


class Normalise(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(variance + eps) + bias, where mean and variance are functions of all ranks' x.

    `call`: notes the sums of backward. Without a world it has them: x is a part of a batch that has passed as a whole.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, r: Tensor,
        count: Tensor, eps: float, world: World | None, ghost: bool, call: Any, *running: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """y: [b, C, ...]."""
        # what runs is not looked at: torch's own refuses backward where forward has written into it, and so does this
        ctx.save_for_backward(x, weight, bias, mean, r, count, *running)
        ctx.world, ctx.ghost, ctx.eps, ctx.call = world, ghost, eps, call
        scale, shift = (None if parameter is None else parameter.to(mean.dtype) for parameter in (weight, bias))
        return F.batch_norm(x, mean, variance, scale, shift, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients; d_x by all ranks' sums, the parameters' by this rank's."""
        x, weight, bias, mean, r, count, *_ = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the gradients' gradients
            if ctx.world is None:
                raise RuntimeError("batch norm by given statistics is once_differentiable")
            return _differentiable(ctx, x, weight, bias, count, dy)
        sums, finish = backward(dy, x, mean, r, weight)
        if ctx.ghost:  # not by a factor of 0, which would let a dummy's inf or nan through
            sums = torch.zeros_like(sums)
        d_weight = (sums[1] * r).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = sums[0].to(bias.dtype) if ctx.needs_input_grad[2] else None
        d_x = None
        if ctx.needs_input_grad[0]:
            total = ctx.call.sums if ctx.world is None else ctx.world.sum(sums.clone())
            if ctx.call is not None:
                ctx.call.sums = total
            # a dummy moves no statistic, and its own loss counts for nothing
            d_x = torch.zeros_like(x) if ctx.ghost else finish(total, count)
        return None if d_x is None else d_x.to(x.dtype), d_weight, d_bias, *[None] * 10


class _Sum(torch.autograd.Function):
    """The sum over the ranks, of which each rank's part gets the gradients of all."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.sum(mine.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient, ctx.world), None


def _differentiable(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, dy: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of `Normalise` by operators that can be differentiated again, as a gradient penalty does."""
    dims, shape = channels(x)
    there = torch.tensor(not ctx.ghost, device=x.device)  # not a factor of 0, which would let a dummy's nan through
    dy = torch.where(there, dy, 0.0)

    def total(values: Tensor) -> Tensor:
        summed: Tensor = _Sum.apply(torch.where(there, values.sum(dims), 0.0), ctx.world)
        return (summed / count).view(shape)

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - total(wide)
    y = centred * torch.rsqrt(total(centred.square()) + ctx.eps)
    for parameter, join in ((weight, torch.mul), (bias, torch.add)):
        y = y if parameter is None else join(y, parameter.view(shape))
    inputs = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed and t is not None]
    found = iter(torch.autograd.grad(y, inputs, dy.to(y.dtype), create_graph=True))
    return *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), *[None] * 10


def _global_statistics(
    x: Tensor, world: World, ghost: bool, in_step: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | int]:
    """Mean [C], sum of squared deviations [C] and count [] per channel over all ranks, by one collective.

    And how often each row is in there: outside of steps all ranks may pass the same, of a loader of the user's own.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels, count = x.shape[1], 0 if ghost else x.numel() // x.shape[1]
    if world.size == 1 and count < 2:
        raise ValueError(f"{_ONE_VALUE}, got input size {list(x.shape)}")
    if count:
        mean, squares = statistics(x)
        mine = torch.cat([mean, squares, mean.new_full((1,), count)])
    else:
        mine = torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    if world.size == 1:
        return mine[:channels], mine[channels:-1], mine[-1], 1
    everyone = mine.new_empty(world.size, mine.numel())
    dist.all_gather(list(everyone.unbind()), mine)
    copies = 1 if in_step else torch.where((everyone == mine).all(), world.size, 1)
    means, squares, counts = everyone[:, :channels], everyone[:, channels:-1], everyone[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    return mean, (squares + counts * (means - mean) ** 2).sum(0), total, copies


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The model's batch normalisations, synchronised or not."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def local_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Those whose statistics are of what passes through this process at once."""
    return [layer for layer in batch_norms(model) if not isinstance(layer, StepBatchNorm)]


def step_batch_norms(model: nn.Module) -> list[StepBatchNorm]:
    """Its layers that have to know of passes and steps."""
    return [layer for layer in batch_norms(model) if isinstance(layer, StepBatchNorm)]


def apart(model: nn.Module) -> list[nn.Module]:
    """The modules whose buffers a dummy batch must leave alone: a SyncBatchNorm's move by others' samples only."""
    return [module for module in model.modules() if not isinstance(module, SyncBatchNorm)]


@contextmanager
def ghost(model: nn.Module, on: bool = True) -> Iterator[None]:
    """Within, forwards of the model are a dummy's: its StepBatchNorms take part and add nothing.

    The backward of a forward made within remembers it, wherever it runs.
    """
    with ExitStack() as stack:
        for layer in step_batch_norms(model):
            stack.enter_context(replaced(layer, ghost=on))
        yield


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
                f"--batch-norm groups: a batch of {self.rows} became {len(x)}, so samples can't be told apart"
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


def convert_sync_batchnorm(module: nn.Module, world: World, skip_unknown: bool = False) -> nn.Module:
    """Make every batch normalisation in `module` a SyncBatchNorm, in place: objects, parameters and hooks stay.

    Raises:
        UserError: for a subclass with a forward of its own, whose meaning can't be known, unless they are skipped.
    """
    for layer in local_batch_norms(module):
        if not (skip_unknown and own_forward(layer)):
            _become(layer, SyncBatchNorm, "global", world=world)
    return module


def convert_group_batchnorm(module: nn.Module, group: int) -> None:
    """As `convert_sync_batchnorm`: a GroupBatchNorm of so many samples of each."""
    for layer in local_batch_norms(module):
        _become(layer, GroupBatchNorm, f"groups:{group}", group=group, waiting=[])


def own_forward(layer: _BatchNorm) -> bool:
    """Whether a subclass computes what nobody can know; timm's add a known end to torch's."""
    known = type(layer) in _PLAIN or type(layer).forward is _BatchNorm.forward
    return not known and not (hasattr(layer, "drop") and hasattr(layer, "act"))


def _become(layer: _BatchNorm, kind: type[StepBatchNorm], how: str, **attributes: Any) -> None:
    """Change a layer's class, and give it what the new one needs."""
    if own_forward(layer):
        name = type(layer).__name__
        raise UserError(f"--batch-norm {how} can't convert {name}: its forward is its own", "Use --batch-norm local.")
    activates = type(layer) not in _PLAIN and type(layer).forward is not _BatchNorm.forward
    joins: Any = kind, type(layer)
    layer.__class__ = _joined(*joins)
    vars(layer).update(attributes, activates=activates)


@cache
def _joined(kind: Any, own: Any) -> Any:
    """`kind`, which is `own` too: what a user asks of nn.BatchNorm2d, as to freeze them all, it is asked as well."""
    if own is _BatchNorm or issubclass(own, nn.SyncBatchNorm):
        return kind
    return type(kind.__name__.replace("BatchNorm", own.__name__), (kind, own), {"joins": (kind, own)})


def _empty(*joins: Any) -> Any:
    kind = _joined(*joins)
    return kind.__new__(kind)


@contextmanager
def announced(layers: Sequence[StepBatchNorm], shard: Shard, rows: int, count: int) -> Iterator[None]:
    """Around the forward pass of `rows` samples: a rank's shard of a global batch of `count`, or a dummy for it.

    Raises:
        UserError: for a shard that is not of whole groups.
    """
    for layer in layers:
        layer.rows, layer.members = rows, shard.members
        if isinstance(layer, GroupBatchNorm):
            layer.used = 0
            within = shard.rows.start % layer.group or (shard.rows.stop % layer.group and shard.rows.stop < count)
            if shard.size and within:
                raise UserError(
                    f"samples {shard.rows.start} to {shard.rows.stop} of a batch are not whole groups of {layer.group}",
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
