"""Sums without an order: floats as integers on a scale that all ranks share.

For a tensor whose largest magnitude over all contributions is M < 2**e, a contribution g becomes `(g *
2**k).to(int64)` with k = 62 - ceil(log2 contributions) - e, so that their sum can't overflow. Multiplying by a power
of two is exact; the conversion drops less than 2**-k, and the sum becomes a float once. Relative to M the error of a
sum of V contributions is below V * 2**(ceil(log2 V) - 61), before its one rounding to the float type: below 2**-54 for
8 of them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# stand-ins for the exponents of 0 and of infinity or NaN; `max` keeps them in order
ZERO, NON_FINITE = -100_000, 100_000
# k of a float32 is limited so that 2**k and 2**-k are normal numbers; gradients below 2**-67 lose bits to that
_LARGEST_K = {torch.float64: 1000, torch.float32: 126, torch.bfloat16: 126, torch.float16: 126}


def exponents(tensors: Sequence[Tensor]) -> Tensor:
    """For each tensor the least e with max |x| < 2**e, or ZERO or NON_FINITE: int32 [len(tensors)], on their device."""
    if not tensors:
        return torch.empty(0, dtype=torch.int32)
    largest = _largest(tensors)
    e = torch.frexp(largest).exponent
    e = torch.where(largest == 0, ZERO, e)
    return torch.where(torch.isfinite(largest), e, NON_FINITE).to(torch.int32)


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """max |x| of each as float64 [n], NaN where there is one. On a CPU several times faster than infinity norms."""
    if tensors[0].device.type != "cpu" and all(t.numel() for t in tensors):  # there a few kernels for all of them
        return torch.stack(torch._foreach_norm([t.detach() for t in tensors], math.inf)).to(torch.float64)
    zero = tensors[0].new_zeros(())
    ends = [torch.aminmax(t.detach()) if t.numel() else (zero, zero) for t in tensors]
    low, high = (torch.stack([end[i] for end in ends]) for i in (0, 1))
    return torch.maximum(-low, high).to(torch.float64)


def scales(exponent: Tensor, contributions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors into and out of fixed point for global exponents: two tensors [n] of `dtype`'s compute type.

    A non-finite exponent gives factors 0 and NaN: every rank then writes NaN, whatever its own part was.
    """
    limit = _LARGEST_K[dtype]
    k = (62 - math.ceil(math.log2(contributions)) - exponent).clamp(-limit, limit)
    finite, wide = exponent < NON_FINITE, dtype == torch.float64
    return torch.where(finite, _power(k, wide), 0.0), torch.where(finite, _power(-k, wide), math.nan)


def _power(k: Tensor, wide: bool) -> Tensor:
    """2**k of normal numbers as float64 or float32, by its bits: a vectorised pow may be an ulp off."""
    if wide:
        return ((k.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((k.to(torch.int32) + 127) << 23).view(torch.float32)


def to_fixed(tensor: Tensor, into: Tensor) -> Tensor:
    """A tensor on the scale `into` (0-dim), as int64 of its shape and strides. Non-finite values become any integer."""
    return (tensor.to(into.dtype) * into).to(torch.int64)


def add_fixed(sums: Tensor, tensors: Sequence[Tensor], into: Tensor) -> None:
    """Write the sum of some tensors on the scale `into` to the int64 tensor `sums`; zero where there is none.

    The first one is converted in place: no zeros to write, no second int64 tensor. Tensors of the scale's own type are
    multiplied in place, and hold no gradient afterwards.
    """
    if not tensors:
        sums.zero_()
    for i, tensor in enumerate(tensors):
        scaled = tensor.mul_(into) if tensor.dtype == into.dtype else tensor.to(into.dtype).mul_(into)
        if i == 0:
            sums.copy_(scaled)
        else:
            sums.add_(scaled.to(torch.int64))


def from_fixed(sums: Tensor, out_of: Tensor, into: Tensor) -> Tensor:
    """Write a summed int64 tensor, taken off its scale, into the floating-point tensor `into`; one rounding."""
    if into.dtype in (torch.float32, torch.float64):
        return into.copy_(sums).mul_(out_of)
    return into.copy_(sums.to(torch.float32).mul_(out_of))
