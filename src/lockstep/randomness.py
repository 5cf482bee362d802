"""Keyed randomness: every draw is a hash of what it is for, never the next value of a hidden state.

A draw is `mix(key + (id + 1) * GOLDEN)` with the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), in
64-bit integers that wrap. The numpy functions (`*_np`) give the same values as the torch ones, an order of magnitude
cheaper for small arrays.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
GOLDEN, MIX1, MIX2 = (value - (1 << 64) for value in (_GOLDEN, _MIX1, _MIX2))  # the int64 of the same bits


def stream(seed: int, *parts: int | str) -> int:
    """The 64-bit key of one purpose, as `stream(seed, "flip", epoch)`; distinct parts give independent keys."""
    text = repr((seed, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    """The int64 with the bits of a 64-bit unsigned value."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(z: Tensor, by: int) -> Tensor:
    # torch's >> on int64 copies the sign bit; masking makes it the logical shift
    return (z >> by) & ((1 << (64 - by)) - 1)


def bits(key: int, ids: Tensor) -> Tensor:
    """64 random bits for each id. ids: int64 [...]; returns int64 [...] on the same device."""
    z = ids * GOLDEN + _signed(key + _GOLDEN)
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def uniform(key: int, ids: Tensor) -> Tensor:
    """A float64 in [0, 1) for each id, with 53 random bits."""
    return _shift(bits(key, ids), 11).to(torch.float64) * 2.0**-53


def integers(key: int, ids: Tensor, n: int) -> Tensor:
    """An int64 in [0, n) for each id, n < 2**31 (multiply-shift: the bias is below n / 2**32)."""
    return (_shift(bits(key, ids), 32) * n) >> 32


def bits_np(key: int, ids: np.ndarray) -> np.ndarray:
    """`bits` for numpy: ids int64 or uint64 [...]; returns uint64 [...]."""
    z = np.asarray(ids).astype(np.uint64) * np.uint64(_GOLDEN)
    z += np.uint64((key + _GOLDEN) & _MASK)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX2)
    z ^= z >> np.uint64(31)
    return z


def uniform_np(key: int, ids: np.ndarray) -> np.ndarray:
    """`uniform` for numpy; returns float64 [...]."""
    return (bits_np(key, ids) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers_np(key: int, ids: np.ndarray, n: int) -> np.ndarray:
    """`integers` for numpy; returns int64 [...]."""
    return (((bits_np(key, ids) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32)).astype(np.int64)
