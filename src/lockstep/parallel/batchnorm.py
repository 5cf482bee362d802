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

from lockstep.parallel import norm_kernels
from lockstep.processes.world import World

_ONE_VALUE = "Expected more than 1 value per channel when training"  # as torch's own batch norm says it


class StepBatchNorm(_BatchNorm):
    """A batch normalisation of [b, C, ...] that knows which part of a step passes through it.

    In evaluation it is torch's own. A pass that nobody announces by `announce` is a batch of its own.
    """

    ghost: bool = False  # what passes is a dummy's, and counts nowhere
    rows: int = 0  # samples that pass, 0 where nobody said
    members: int = 0  # samples of the micro-batch that they belong to, over all ranks

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, C, ...] -> the same shape and dtype."""
        if x.ndim < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"expected [batch, {self.num_features}, ...], got {list(x.shape)}")
        if self.training:
            return self.finish(self.normalise(x))
        by_batch = self.running_mean is None  # then there is nothing else to normalise by, as in torch's own
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, by_batch, 0.0, self.eps)
        return self.finish(y)

    def normalise(self, x: Tensor) -> Tensor:
        """x normalised by the statistics of training."""
        raise NotImplementedError

    def finish(self, y: Tensor) -> Tensor:
        """What follows in the same module; nothing here."""
        return y

    def track(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards a batch's."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
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

    def normalise(self, x: Tensor) -> Tensor:
        """x by the statistics of all ranks' samples; raises ValueError, on all alike, where they are a single one."""
        if self.rows and x.numel() // self.num_features * self.members // self.rows < 2:
            raise ValueError(f"{_ONE_VALUE}, got {self.members} sample(s) of size {list(x.shape[1:])} over all ranks")
        with torch.no_grad():
            mean, squares, count = _global_statistics(x, self.world, self.ghost)
            variance = squares / count
            if self.track_running_stats:
                self.track(mean, squares / (count - 1).clamp(min=1))
        y: Tensor = _Normalise.apply(x, self.weight, self.bias, mean, variance, count, self.eps, self.world, self.ghost)
        return y


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
        """The gradients; d_x by all ranks' sums, the parameters' by this rank's."""
        x, weight, mean, r, count = ctx.saved_tensors
        sums, finish = norm_kernels.backward(dy, x, mean, r, weight)
        if ctx.ghost:  # not by a factor of 0, which would let a dummy's inf or nan through
            sums = torch.zeros_like(sums)
        d_weight = (sums[1] * r).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = sums[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        d_x = None
        if ctx.needs_input_grad[0]:
            total = ctx.world.sum(sums.clone())
            # a dummy moves no statistic, and its own loss counts for nothing
            d_x = torch.zeros_like(x) if ctx.ghost else finish(total, count)
        return None if d_x is None else d_x.to(x.dtype), d_weight, d_bias, None, None, None, None, None, None


def _global_statistics(x: Tensor, world: World, ghost: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [C], sum of squared deviations [C] and count [] per channel over all ranks, by one collective."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels, count = x.shape[1], 0 if ghost else x.numel() // x.shape[1]
    if world.size == 1 and count < 2:
        raise ValueError(f"{_ONE_VALUE}, got input size {list(x.shape)}")
    if count:
        mean, squares = norm_kernels.statistics(x)
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


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The model's batch normalisations, synchronised or not."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def local_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Those whose statistics are of what passes through this process at once."""
    return [layer for layer in batch_norms(model) if not isinstance(layer, StepBatchNorm)]


def step_batch_norms(model: nn.Module) -> list[StepBatchNorm]:
    """Those that want to be told of passes and steps."""
    return [layer for layer in batch_norms(model) if isinstance(layer, StepBatchNorm)]


def apart(model: nn.Module) -> list[nn.Module]:
    """The modules whose buffers a dummy batch must leave alone: a SyncBatchNorm's move by others' samples only."""
    return [module for module in model.modules() if not isinstance(module, SyncBatchNorm)]


@contextmanager
def ghost(model: nn.Module, on: bool = True) -> Iterator[None]:
    """Within, forwards of the model are a dummy's: its StepBatchNorms take part and add nothing.

    The backward of a forward made within remembers it, wherever it runs.
    """
    before = {module: module.ghost for module in model.modules() if isinstance(module, StepBatchNorm)}
    for layer in before:
        layer.ghost = on
    try:
        yield
    finally:
        for layer, value in before.items():
            layer.ghost = value
