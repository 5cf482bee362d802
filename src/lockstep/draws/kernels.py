"""Random numbers for samples: row i is a function of key i and of the place in the row, on any device.

Word w of a row is SplitMix64's finaliser over key + (w + 1) * GOLDEN, where the keys are hashes themselves: unmixed
ones, as small sample ids, would leave rows visibly correlated. A mask takes four 16-bit draws out of a word. On the CPU
[64, 9216] costs 0.8 ms on one thread and its product 1.4 ms; torch's dropout takes 7.1 ms.
"""

import math

import torch
from torch import Tensor

from lockstep.randomness import GOLDEN, MIX1, MIX2

_BLOCK = 1 << 15  # words worked on at once on the CPU: what its caches hold
_GRAIN = 1 << 16  # masks keep with a probability of so many parts
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of a uniform number
_steps: dict[torch.device, Tensor] = {}  # (w + 1) * GOLDEN for as many words as were asked for yet


def words(keys: Tensor, count: int) -> Tensor:
    """64 random bits for each place of each row. keys: int64 [b], hashes; returns int64 [b, count]."""
    steps = _golden(keys.device, count)
    if keys.device.type != "cpu":
        z = keys[:, None] + steps
        return _mixed(z, torch.empty_like(z))
    out = torch.empty(len(keys), count, dtype=torch.int64)
    rows = max(1, _BLOCK // max(1, count))
    scratch = torch.empty(min(rows, len(keys)), min(count, _BLOCK), dtype=torch.int64)
    for start in range(0, len(keys), rows):
        for left in range(0, count, _BLOCK):
            z = out[start : start + rows, left : left + _BLOCK]
            torch.add(keys[start : start + rows, None], steps[left : left + _BLOCK], out=z)
            _mixed(z, scratch[: z.shape[0], : z.shape[1]])
    return out


def _golden(device: torch.device, count: int) -> Tensor:
    known = _steps.get(device)
    if known is None or len(known) < count:
        known = _steps[device] = torch.arange(1, count + 1, device=device) * GOLDEN
    return known[:count]


def _mixed(z: Tensor, scratch: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    for by, factor in ((30, MIX1), (27, MIX2), (31, 0)):
        torch.bitwise_right_shift(z, by, out=scratch)
        scratch &= (1 << (64 - by)) - 1  # the shift copies the sign bit
        z ^= scratch
        if factor:
            z *= factor
    return z


def keep_rate(p: float) -> float:
    """The probability with which a mask of drop probability `p` keeps: a multiple of 2**-16."""
    return round((1 - p) * _GRAIN) / _GRAIN


def keep(keys: Tensor, n: int, p: float) -> Tensor:
    """A mask, true with `keep_rate(p)`: bool [b, n]."""
    bits = words(keys, -(-n // 4)).view(torch.int16)[:, :n]
    limit = round(keep_rate(p) * _GRAIN) - _GRAIN // 2
    if limit == _GRAIN // 2:  # 1, which no int16 is below
        return torch.ones_like(bits, dtype=torch.bool)
    return bits < limit


def uniform(keys: Tensor, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers in [0, 1), with as many random bits as the dtype has: [b, n]."""
    digits = _DIGITS[dtype]
    return _top(words(keys, n), digits).to(dtype).mul_(2.0**-digits)


def _inner(keys: Tensor, n: int) -> Tensor:
    """Float64 in (0, 1), 0 and 1 left out: [b, n]."""
    return _top(words(keys, n), 52).to(torch.float64).add_(0.5).mul_(2.0**-52)


def normal(keys: Tensor, n: int) -> Tensor:
    """Standard normal numbers, float64 [b, n], by the inverse of the distribution."""
    return _inner(keys, n).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))


def exponential(keys: Tensor, n: int) -> Tensor:
    """Exponential numbers of mean 1, above 0: float64 [b, n]."""
    return _inner(keys, n).log_().neg_()


def integers(keys: Tensor, n: int, below: int) -> Tensor:
    """Int64 in [0, below), below < 2**31 (multiply-shift: the bias is below `below` / 2**32): [b, n]."""
    return (_top(words(keys, n), 32) * below) >> 32


def _top(z: Tensor, digits: int) -> Tensor:
    return (z >> (64 - digits)) & ((1 << digits) - 1)
