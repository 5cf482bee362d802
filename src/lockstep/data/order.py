"""Which samples form step t of an epoch: a keyed permutation, computed a batch at a time.

The permutation is a Feistel network over the mixed-radix digits of a sample's position (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002): position = left * b + right with a * b just above n, each round adds a
keyed hash of one digit to the other, and the few results at or above n are walked on until they fall below it. Memory
is O(batch), so an epoch over 10^12 samples starts at once and resuming in the middle costs nothing.
"""

import hashlib
import math
from collections.abc import Iterator

import numpy as np

from lockstep.errors import UserError
from lockstep.randomness import bits_np, stream

# A round costs about 12 us for 256 ids. Over tiny ranges 8 rounds leave some permutations visibly rarer (chi-square
# over all permutations of 3 to 7 items); 16 leave no trace.
_ROUNDS, _ROUNDS_SMALL, _SMALL = 8, 16, 1024
_TOGETHER = 2048  # ids computed at once: below it numpy's cost a call is felt beside the smallest nets' steps
_MOST_WAITING = 1024  # ids that a ledger keeps to hash them later


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where a keyed permutation of range(n) sends `positions`.

    Args:
        positions: int64 [b], each in [0, n).
        n: size of the permuted range, below 2**62.
        key: 64-bit key from `randomness.stream`.

    Returns:
        int64 [b], each in [0, n), all different where the positions are.
    """
    a = math.isqrt(n - 1) + 1
    a += a % 2  # rotating digits of odd bases makes even permutations alone: one base is even
    b = -(-n // a)
    rounds = _ROUNDS_SMALL if n < _SMALL else _ROUNDS
    out = _network(positions.astype(np.uint64), a, b, key, rounds)
    while (over := np.flatnonzero(out >= n)).size:
        out[over] = _network(out[over], a, b, key, rounds)
    return out.astype(np.int64)


def _network(x: np.ndarray, a: int, b: int, key: int, rounds: int) -> np.ndarray:
    left, right = np.divmod(x, np.uint64(b))
    for round_ in range(rounds):
        if round_ % 2 == 0:
            left = _add(left, bits_np(key + round_, right), a)
        else:
            right = _add(right, bits_np(key + round_, left), b)
    return np.asarray(left * np.uint64(b) + right)


def _add(digit: np.ndarray, noise: np.ndarray, base: int) -> np.ndarray:
    # multiply-shift instead of a 64-bit modulo, which numpy does one slow division at a time
    total: np.ndarray = digit + (((noise >> np.uint64(32)) * np.uint64(base)) >> np.uint64(32))
    return total - np.where(total >= base, np.uint64(base), np.uint64(0))


class Order:
    """The global sample ids of every step, a function of (seed, epoch, step) alone.

    Args:
        n: samples in the training set.
        batch_size: samples per step over all ranks.
        seed: the run's seed.
        fraction: the part of the set to use; its members are a seeded random subset, fixed for the run.
        drop_last: leave out an epoch's short last batch.
    """

    def __init__(self, n: int, batch_size: int, seed: int, fraction: float = 1.0, drop_last: bool = False) -> None:
        used = max(1, round(n * fraction))
        if n < 1:
            raise UserError("the training set is empty", "Give a data set with at least one image.")
        if drop_last and used < batch_size:
            raise UserError(
                f"--drop-last leaves nothing: {used} samples do not fill one batch of {batch_size}",
                "Use a smaller --batch-size, or keep the short batch.",
            )
        self.n, self.batch_size, self.seed, self.fraction = n, batch_size, seed, fraction
        self.samples_per_epoch = used // batch_size * batch_size if drop_last else used
        self.steps_per_epoch = -(-self.samples_per_epoch // batch_size)
        self.used = used
        self.subset_key = stream(seed, "subset")
        self.together = max(1, _TOGETHER // batch_size)  # steps
        self._kept, self._ids = (-1, -1), np.empty(0, np.int64)  # the newest ones, by epoch and first step

    def step(self, epoch: int, t: int) -> np.ndarray:
        """The sample ids of step t of an epoch: int64 [B], B = batch_size but for a short last batch."""
        if not 0 <= t < self.steps_per_epoch:
            raise IndexError(f"step {t} of an epoch of {self.steps_per_epoch}")
        first = t - t % self.together
        if self._kept != (epoch, first):
            self._kept, self._ids = (epoch, first), self._computed(epoch, first)
        at = (t - first) * self.batch_size
        return self._ids[at : at + self.batch_size]

    def steps(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """The ids of each step of an epoch, from step `start` on."""
        return (self.step(epoch, t) for t in range(start, self.steps_per_epoch))

    def members(self) -> np.ndarray | None:
        """The ids that are used, int64 [samples]; None: all. The one thing here that takes memory for each of them."""
        return permute(np.arange(self.used), self.n, self.subset_key) if self.used < self.n else None

    def _computed(self, epoch: int, t: int) -> np.ndarray:
        """The ids of the steps from step t on that are computed together."""
        start, end = t * self.batch_size, min((t + self.together) * self.batch_size, self.samples_per_epoch)
        ids = permute(np.arange(start, end), self.used, stream(self.seed, "order", epoch))
        return permute(ids, self.n, self.subset_key) if self.used < self.n else ids


EMPTY_LEDGER = bytes(32)
_LITTLE = np.dtype("<i8")


def extend_ledger(ledger: bytes, ids: np.ndarray) -> bytes:
    """The ledger after one more step: SHA-256 over the ledger so far and the step's global ids (int64, little-endian).

    A chain of digests rather than one long hash, so that 32 bytes of state continue it after a resume.
    """
    return hashlib.sha256(ledger + ids.astype(_LITTLE, copy=False).tobytes()).digest()


class Ledger:
    """The ledger of a run under way. Steps are hashed when somebody asks for it, or when many wait.

    Hashed one by one between two steps, each would find its code out of the processor's caches: several times the time.
    """

    def __init__(self, digest: bytes = EMPTY_LEDGER) -> None:
        self._digest, self._waiting, self._ids = digest, list[np.ndarray](), 0

    def extend(self, ids: np.ndarray) -> None:
        """Note one more step: its global ids, int64 [B], which nobody may change afterwards."""
        self._waiting.append(ids)
        self._ids += len(ids)
        if self._ids >= _MOST_WAITING:
            self._hash()

    @property
    def digest(self) -> bytes:
        """What `extend_ledger` makes of all steps so far: 32 bytes."""
        if self._waiting:
            self._hash()
        return self._digest

    def _hash(self) -> None:
        for ids in self._waiting:
            self._digest = extend_ledger(self._digest, ids)
        self._waiting.clear()
        self._ids = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.digest == other.digest

    __hash__ = None  # type: ignore[assignment]  # it changes
