"""Batch normalisation over the global batch on any device.

torch's SyncBatchNorm refuses CPU tensors in training once a process group exists; this one needs only collectives.

Each rank hands in its mean, its sum of squared deviations and its count. They combine by the formula of Chan, Golub and
LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979), so nothing large cancels.

A rank's loss is its own samples' part of the global loss (times N where the engine averages afterwards: a factor that
every dy of every rank carries alike). Then the sums over ranks of dy and dy (x - mean) are those of one process with
the whole batch, so are the input gradients, and weight and bias gradients are local sums that the engine adds up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UserError
from lockstep.processes.world import World

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of [b, C, ...] whose training statistics are those of all ranks' samples together.

    Every rank has to run every training forward and backward. A rank without samples runs a dummy batch with `ghost`
    set: it is normalised by the others' statistics and adds nothing to them, nor to any gradient. Evaluation is local.
    Statistics are float32 at least; the running variance is unbiased by the global count.
    """

    ghost: bool = False

    def __init__(self, num_features: int, world: World, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(num_features, eps, momentum)
        self.world = world

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, C, ...] -> the same shape and dtype."""
        if x.ndim < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"expected [batch, {self.num_features}, ...], got {list(x.shape)}")
        if not self.training:
            by_batch = self.running_mean is None  # then there is nothing else to normalise by, as in torch's own
            y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, by_batch, 0.0, self.eps)
            return self.finish(y)
        with torch.no_grad():
            mean, squares, count = _global_statistics(x, self.world, self.ghost)
            variance = squares / count
            if self.track_running_stats:
                self._track(mean, squares / (count - 1).clamp(min=1))
        return self.finish(
            _Normalise.apply(x, self.weight, self.bias, mean, variance, count, self.eps, self.world, self.ghost)
        )

    def finish(self, y: Tensor) -> Tensor:
        """What follows in the same module; nothing here."""
        return y

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            new = new.to(running.dtype)
            if self.momentum is not None:
                running.lerp_(new, self.momentum)
            else:  # the average of all batches; the count stays on the device, where `.item()` would wait for it
                running.add_((new - running) / self.num_batches_tracked)


class _SyncBatchNormAct(SyncBatchNorm):
    """With the dropout and activation that timm puts into its normalisation layers."""

    drop: nn.Module
    act: nn.Module

    def finish(self, y: Tensor) -> Tensor:
        return self.act(self.drop(y))  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(variance + eps) + bias, where mean and variance are functions of all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        world: World,
        ghost: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.world, ctx.ghost, ctx.bias_dtype = world, ghost, None if bias is None else bias.dtype
        scale, shift = (None if parameter is None else parameter.to(mean.dtype) for parameter in (weight, bias))
        return F.batch_norm(x, mean, variance, scale, shift, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Ioffe and Szegedy, "Batch normalization", 2015, with m the global count and both sums over all ranks:

        dx = weight r (dy - sum(dy) / m - (x - mean) r^2 sum(dy (x - mean)) / m),  r = 1 / sqrt(variance + eps).
        """
        x, weight, mean, r, count = ctx.saved_tensors
        dims, shape = _channels(x)
        dy = dy.to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        sums = torch.stack([dy.sum(dims), (dy * centred).sum(dims)])  # [2, C]
        if ctx.ghost:  # not by a factor of 0, which would let a dummy's inf or nan through
            sums = torch.zeros_like(sums)
        d_weight = (sums[1] * r).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = sums[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        d_x = None
        if ctx.needs_input_grad[0]:
            sum_dy, sum_dy_xmu = ctx.world.sum(sums.clone()) / count
            if ctx.ghost:  # a dummy moves no statistic, and its own loss counts for nothing
                d_x = torch.zeros_like(x)
            else:
                gain = r if weight is None else r * weight.to(r.dtype)
                slope, offset = -gain * r * r * sum_dy_xmu, -gain * sum_dy
                d_x = centred.mul_(slope.view(shape)).add_(offset.view(shape)).addcmul_(dy, gain.view(shape))
        return None if d_x is None else d_x.to(x.dtype), d_weight, d_bias, None, None, None, None, None, None


def _channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions to reduce over, and the shape in which [C] broadcasts over x."""
    return [0, *range(2, x.ndim)], [-1, *(1 for _ in range(2, x.ndim))]


def _global_statistics(x: Tensor, world: World, ghost: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [C], sum of squared deviations [C] and count [] per channel over all ranks, by one collective."""
    dims, shape = _channels(x)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels, count = x.shape[1], 0 if ghost else x.numel() // x.shape[1]
    if world.size == 1 and count < 2:
        raise ValueError(f"batch statistics need more than one value per channel, got input size {list(x.shape)}")
    if count:
        mean = x.mean(dims, dtype=dtype)
        squares = (x - mean.view(shape)).square_().sum(dims)  # two passes: several times faster than var_mean on a CPU
        mine = torch.cat([mean, squares, mean.new_full((1,), count)])
    else:
        mine = torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    if world.size == 1:
        return mine[:channels], mine[channels:-1], mine[-1]
    everyone = mine.new_empty(world.size, mine.numel())
    dist.all_gather(list(everyone.unbind()), mine)
    means, squares, counts = everyone[:, :channels], everyone[:, channels:-1], everyone[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    return mean, (squares + counts * (means - mean) ** 2).sum(0), total


def convert_sync_batchnorm(module: nn.Module, world: World) -> nn.Module:
    """Replace every batch normalisation in `module` by a SyncBatchNorm with the same parameters and buffers.

    Parameters are moved, not copied, so an optimizer built before still holds them. Returns the module, or its
    replacement where it is a batch normalisation itself.

    Raises:
        UserError: for a subclass with a forward of its own, whose meaning can't be known.
    """
    replacements: dict[nn.Module, nn.Module] = {m: _converted(m, world) for m in local_batch_norms(module)}
    for name, layer in list(module.named_modules(remove_duplicate=False)):  # a layer may stand in several places
        if name and layer in replacements:
            module.set_submodule(name, replacements[layer])
    return replacements.get(module, module)


def _converted(old: _BatchNorm, world: World) -> SyncBatchNorm:
    kind = SyncBatchNorm
    if type(old) not in _PLAIN and type(old).forward is not _BatchNorm.forward:
        if not (hasattr(old, "drop") and hasattr(old, "act")):
            name = type(old).__name__
            raise UserError(f"--sync-bn can't convert {name}: its forward is its own", "Leave --sync-bn out.")
        kind = _SyncBatchNormAct
    new = kind(old.num_features, world, old.eps, old.momentum)
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    for name in ("affine", "track_running_stats", *tensors):
        setattr(new, name, getattr(old, name))
    if isinstance(new, _SyncBatchNormAct):
        new.drop, new.act = old.drop, old.act  # type: ignore[assignment]
    return new.train(old.training)


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The model's batch normalisations, synchronised or not."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def local_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Those whose statistics are of what passes through this process at once."""
    return [layer for layer in batch_norms(model) if not isinstance(layer, SyncBatchNorm)]


@contextmanager
def ghost(model: nn.Module, on: bool = True) -> Iterator[None]:
    """Within, forwards of the model are a dummy's: its SyncBatchNorms take part and add nothing.

    The backward of a forward made within remembers it, wherever it runs.
    """
    before = {module: module.ghost for module in model.modules() if isinstance(module, SyncBatchNorm)}
    for layer in before:
        layer.ghost = on
    try:
        yield
    finally:
        for layer, value in before.items():
            layer.ghost = value
