"""What batch normalisation over all ranks computes of a rank's own samples: by plain operators, or torch's fused ones.

The fused ones are those of torch's own SyncBatchNorm, which exist on CUDA and ROCm alone: one pass over x for the
statistics where the plain ones take three, and two in backward where they take nine. They have not been run on a GPU
from here yet: the tests hold them, through stand-ins that compute what the operators are to compute, to the plain ones.
"""

from collections.abc import Callable

import torch
from torch import Tensor

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
