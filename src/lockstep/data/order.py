"""Which samples form step t of an epoch, and how a global batch is cut: functions of (seed, epoch, step) alone.

The order is a keyed permutation, computed a batch at a time: a Feistel network over the mixed-radix digits of a
sample's position (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). position = left * b + right
with a * b just above n; each round adds a keyed hash of one digit to the other, and the few results at or above n are
walked on until they fall below it. Memory is O(batch): an epoch over 10^12 samples starts at once.

A set in shards may be read in windows: shards in a keyed order, the samples of each `window` of them permuted together.
Sums over the permuted shards' sizes find a position's window and shard; memory is O(shards).

A sample that comes for the k-th time (from 0) has the number id + k n, by which its draws are keyed; see loaders.py.
Balance: an epoch has a fixed count of draws of each class, in a permuted order. Every class's samples are walked
through without replacement, permuted again for each round, from epoch to epoch: two samples of a class have always come
equally often, but for one. Repeats: Hoffer et al., "Augment Your Batch", CVPR 2020. A batch of B holds B / R samples,
each R times, B / R positions apart so that neighbours, which mixup takes for pairs, are different ones.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lockstep.data.image_sets import Ids, ImageSet, label_sets
from lockstep.distributed.world import World, shard_of
from lockstep.errors import UserError
from lockstep.randomness import bits_np, stream

Balance = Literal["none", "equal", "sqrt"]
# A round costs about 12 us for 256 ids. Over tiny ranges 8 rounds leave some permutations visibly rarer (chi-square
# over all permutations of 3 to 7 items); 16 leave no trace.
_ROUNDS, _ROUNDS_SMALL, _SMALL = 8, 16, 1024
_TOGETHER = 2048  # ids computed at once: below it numpy's cost a call is felt beside the smallest nets' steps
_MOST_WAITING = 1024  # ids that a ledger keeps to hash them later
EMPTY_LEDGER = bytes(32)


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where a keyed permutation of range(n), n below 2**62, sends `positions`, int64 [b] in [0, n). `key`: 64 bits."""
    a = math.isqrt(n - 1) + 1
    a += a % 2  # rotating digits of odd bases makes even permutations alone: one base is even
    bases = np.uint64(a), np.uint64(-(-n // a))
    rounds = _ROUNDS_SMALL if n < _SMALL else _ROUNDS

    def noise(number: int, digit: np.ndarray) -> np.ndarray:
        return bits_np(key + number, digit)

    out = _network(positions.astype(np.uint64), *bases, rounds, noise)
    while (over := np.flatnonzero(out >= n)).size:
        out[over] = _network(out[over], *bases, rounds, noise)
    return out.astype(np.int64)


def _network(x: np.ndarray, a: Any, b: Any, rounds: int, noise: Callable[[int, np.ndarray], np.ndarray]) -> np.ndarray:
    """`a` and `b`, uint64: the digits' bases, of all or of each; `noise`: 64 bits of a round for each digit."""
    left, right = np.divmod(x, b)
    for number in range(rounds):
        if number % 2 == 0:
            left = _add(left, noise(number, right), a)
        else:
            right = _add(right, noise(number, left), b)
    return np.asarray(left * b + right)


def _add(digit: np.ndarray, noise: np.ndarray, base: Any) -> np.ndarray:
    # multiply-shift instead of a 64-bit modulo, which numpy does one slow division at a time
    total: np.ndarray = digit + (((noise >> np.uint64(32)) * base) >> np.uint64(32))
    return np.asarray(np.minimum(total, total - base))  # what falls below 0 comes round as a huge number


class Order:
    """The global sample numbers of every step, a function of (seed, epoch, step) alone.

    Of `n` samples a `fraction` is used, a seeded random subset that is fixed for the run; `batch_size` of them in each
    step, over all ranks; `drop_last` leaves out an epoch's short last batch. `repeats`: how often each sample comes in
    its batch, whose size it divides. `classes`: what is balanced (None: nothing). `windows`: of a set in shards.
    """

    def __init__(
        self, n: int, batch_size: int, seed: int, fraction: float = 1.0, drop_last: bool = False, repeats: int = 1,
        classes: "Classes | None" = None, windows: "Windows | None" = None,
    ) -> None:  # fmt: skip
        if n < 1:
            raise UserError("the training set is empty", "Give a data set with at least one image.")
        self.n, self.batch_size, self.seed, self.fraction = n, batch_size, seed, fraction
        self.repeats, self.classes, self.used = repeats, classes, max(1, round(n * fraction))
        self.windows = windows
        self.draws = classes.draws if classes is not None else -(-self.used // repeats)  # different ones an epoch
        self._per_step = batch_size // repeats
        self._whole = self.draws // self._per_step * self._per_step if drop_last else self.draws
        if not self._whole:
            each = f", {repeats} times each," if repeats > 1 else ""
            what = f"--drop-last leaves nothing: {self.draws} samples{each} do not fill one batch of {batch_size}"
            raise UserError(what, "Use a smaller --batch-size, or keep the short batch.")
        self.samples_per_epoch = self._whole * repeats
        self.steps_per_epoch = -(-self._whole // self._per_step)
        self.subset_key = stream(seed, "subset")
        self.together = max(1, _TOGETHER // batch_size)  # steps
        self._kept, self._ids = (-1, -1), np.empty(0, np.int64)  # the newest ones, by epoch and first step

    @property
    def note(self) -> str:
        """For the run's start: what an epoch is, where that is not each sample once."""
        parts = [self.classes.note] if self.classes is not None else []
        if self.repeats > 1:
            parts.append(f"each of {self._whole:,} draws {self.repeats} times in its batch")
        return f"an epoch is {self.samples_per_epoch:,} images: {'; '.join(parts)}" if parts else ""

    def step(self, epoch: int, t: int) -> np.ndarray:
        """The sample numbers of step t of an epoch: int64 [B], B = batch_size but for a short last batch."""
        if not 0 <= t < self.steps_per_epoch:
            raise IndexError(f"step {t} of an epoch of {self.steps_per_epoch}")
        first = t - t % self.together
        if self._kept != (epoch, first):
            end = min((first + self.together) * self.batch_size, self.samples_per_epoch)
            self._kept, self._ids = (epoch, first), self._computed(epoch, np.arange(first * self.batch_size, end))
        at = (t - first) * self.batch_size
        return self._ids[at : at + self.batch_size]

    def steps(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """The numbers of each step of an epoch, from step `start` on."""
        return (self.step(epoch, t) for t in range(start, self.steps_per_epoch))

    def members(self) -> np.ndarray | None:
        """The ids that are used, int64 [samples]; None: all. The one thing here that takes memory for each of them."""
        return self._of_subset(np.arange(self.used)) if self.used < self.n else None

    def _of_subset(self, ids: Ids) -> Ids:
        return permute(ids, self.n, self.subset_key) if self.used < self.n else ids

    def _shuffled(self, number: int, places: Ids) -> Ids:
        """The sample ids at these places of a walk through all samples that are used."""
        if self.windows is not None:
            return self.windows.shuffled(number, places)
        return self._of_subset(permute(places, self.used, stream(self.seed, "order", number)))

    def _computed(self, epoch: int, positions: Ids) -> Ids:
        """The sample numbers at these positions of an epoch."""
        if self.repeats == 1 and self.classes is None:
            return self._shuffled(epoch, positions)
        step, position = np.divmod(positions, self.batch_size)
        first = step * self._per_step
        here = np.minimum(self._per_step, self._whole - first)  # of the step's different samples
        slots = first + position % here
        if self.classes is not None:
            ids, rounds = self.classes.drawn(epoch, permute(slots, self.draws, stream(self.seed, "order", epoch)))
        else:  # the walk through the set goes on where the last epoch ended
            rounds, places = np.divmod(epoch * self._whole + slots, self.used)
            ids = np.empty(len(slots), np.int64)
            for number in np.unique(rounds):
                at = rounds == number
                ids[at] = self._shuffled(int(number), places[at])
        return np.asarray(ids + self.n * (rounds * self.repeats + position // here))


class Windows:
    """The order of a set in shards: those in a keyed order, and the samples of every `width` of them shuffled together.

    `sizes`: samples of each shard, int64 [shards], in the order of the ids. A `fraction` of each is used, a random
    subset that is fixed for the run.
    """

    def __init__(self, sizes: Ids, width: int, seed: int, fraction: float = 1.0) -> None:
        self.sizes, self.width, self.seed = sizes, width, seed
        ends = np.cumsum(sizes)
        self.firsts = ends - sizes
        used = np.rint(ends * fraction).astype(np.int64)
        if not used[-1]:
            used[int(sizes.argmax()) :] = 1
        self.used = np.diff(used, prepend=0)  # of each shard; the sum is Order's

    def shards(self, epoch: int) -> Ids:
        """The shards as an epoch comes to them; every `width` of them are a window."""
        return permute(np.arange(len(self.sizes)), len(self.sizes), stream(self.seed, "shards", epoch))

    def shuffled(self, epoch: int, places: Ids) -> Ids:
        """The sample ids at these places of an epoch, int64 [b] in [0, samples that are used)."""
        shards = self.shards(epoch)
        ends = np.cumsum(self.used[shards])
        bounds = np.append(0, ends[[*range(self.width - 1, len(ends) - 1, self.width), len(ends) - 1]])
        window = np.searchsorted(bounds, places, side="right") - 1
        first = bounds[window]
        keys = bits_np(stream(self.seed, "window", epoch), window)
        mixed = first + permute_each(places - first, bounds[window + 1] - first, keys)
        place = np.searchsorted(ends, mixed, side="right")
        shard = shards[place]
        inside = mixed - (ends[place] - self.used[shard])
        if (self.used < self.sizes).any():
            inside = permute_each(inside, self.sizes[shard], bits_np(stream(self.seed, "subset"), shard))
        return np.asarray(self.firsts[shard] + inside)


def extend_ledger(ledger: bytes, ids: np.ndarray) -> bytes:
    """The ledger after one more step: SHA-256 over the ledger so far and the step's global ids (int64, little-endian).

    A chain of digests rather than one long hash, so that 32 bytes of state continue it after a resume.
    """
    return hashlib.sha256(ledger + ids.astype("<i8", copy=False).tobytes()).digest()


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
            self._digest = self.digest

    @property
    def digest(self) -> bytes:
        """What `extend_ledger` makes of all steps so far: 32 bytes."""
        for ids in self._waiting:
            self._digest = extend_ledger(self._digest, ids)
        self._waiting.clear()
        self._ids = 0
        return self._digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.digest == other.digest

    __hash__ = None  # type: ignore[assignment]  # it changes


class Classes:
    """The samples by class, and how many draws each class has in an epoch.

    `labels`: int64 [n], of which `ids` are used (None: all), of `count` classes. `balance`: "equal", or "sqrt": a class
    has draws as the square root of its samples. `repeats`: how often each draw comes; an epoch has as many fewer.
    """

    def __init__(
        self, labels: Ids, ids: Ids | None, count: int, seed: int, balance: Balance = "equal", repeats: int = 1
    ) -> None:
        mine = labels if ids is None else labels[ids]
        sizes = np.bincount(mine, minlength=count)
        self.present = np.flatnonzero(sizes)
        self.sizes = sizes[self.present]  # int64 [c]
        shares = np.sqrt(self.sizes) if balance == "sqrt" else np.ones(len(self.sizes))
        counts = np.maximum(1, np.rint(len(mine) / repeats * shares / shares.sum()))
        self.counts = counts.astype(np.int64)  # draws an epoch
        self._ends = np.cumsum(self.counts)
        self._firsts = np.cumsum(self.sizes) - self.sizes
        small = np.int32 if len(labels) < 2**31 else np.int64
        self._index: np.ndarray | None = None  # ids by class; none where they are in that order
        if ids is not None or (len(mine) > 1 and bool((np.diff(mine) < 0).any())):
            by_class = np.argsort(mine, kind="stable")
            self._index = (by_class if ids is None else ids[by_class]).astype(small)
        self._key = stream(seed, "balance")

    @property
    def draws(self) -> int:
        """Draws of an epoch."""
        return int(self._ends[-1])

    @property
    def note(self) -> str:
        """How often classes come, and how often a sample does."""
        draws, times = self.counts, self.counts / self.sizes
        each = f"{draws.min():,}" if draws.min() == draws.max() else f"{draws.min():,} to {draws.max():,}"
        return f"{each} draws of each class, so a sample comes {times.min():.2g} to {times.max():.2g} times"

    def drawn(self, epoch: int, places: Ids) -> tuple[Ids, Ids]:
        """The sample ids at these places of an epoch, int64 [b] in [0, draws), and the round through their class."""
        which = np.searchsorted(self._ends, places, side="right")
        sizes = self.sizes[which]
        turn = epoch * self.counts[which] + places - (self._ends[which] - self.counts[which])
        rounds, at = np.divmod(turn, sizes)
        keys = bits_np(self._key, self.present[which] + (rounds << 32))
        place = self._firsts[which] + permute_each(at, sizes, keys)
        return (place if self._index is None else self._index[place].astype(np.int64)), rounds


def permute_each(positions: Ids, n: Ids, keys: np.ndarray) -> Ids:
    """`permute`, with a range n, int64 [b] below 2**52, and a key, uint64 [b], for each position."""
    a = np.ceil(np.sqrt(n)).astype(np.uint64)
    a += a % np.uint64(2)
    b = (n.astype(np.uint64) + a - np.uint64(1)) // a
    out = positions.astype(np.uint64)
    over = np.arange(len(out))

    def noise(number: int, digit: np.ndarray) -> np.ndarray:
        # a key of its own for each round and position; the digit is what is hashed
        return bits_np(0, bits_np(0, keys[over] + np.uint64(number)) ^ digit)

    while over.size:
        out[over] = _network(out[over], a[over], b[over], _ROUNDS_SMALL, noise)  # classes may be small
        over = over[out[over] >= n[over].astype(np.uint64)]
    return out.astype(np.int64)


def labels_of(images: ImageSet, flag: str) -> Ids:
    """The labels of all samples of a set, int64 [n], without reading an image.
    Raises UserError for a set that does not hold them, naming the flag that asks for them.
    """
    if label_sets(images) is not None:
        raise UserError(
            f"{flag}: it goes by a picture's class, and those of {images.name} have several each", "Leave it out."
        )
    held = getattr(images, "labels", None)
    dataset = getattr(images, "dataset", None)
    chosen: list[np.ndarray] = []
    while held is None and dataset is not None:  # as torch's Subset wraps another one
        held = getattr(dataset, "targets", None)
        if held is None and getattr(dataset, "indices", None) is not None:
            chosen.append(np.asarray(dataset.indices))
        dataset = getattr(dataset, "dataset", None)
    labels = np.asarray([] if held is None else held)
    for indices in reversed(chosen):
        labels = labels[indices] if len(labels) else labels
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        what = f"{flag}: {images.name} does not say which class each of its {len(images):,} samples has"
        raise UserError(what, "Give a Dataset `targets`, an ImageSet `labels`: a whole number for each sample.")
    return labels.astype(np.int64, copy=False)


@dataclass(frozen=True)
class Shard:
    """A rank's part of a micro-batch: a run of the global batch that passes through the model at once."""

    micro: int  # number of the micro-batch, or in exact mode of the slice, that it belongs to: the same on every N
    key: int  # differs for all shards of a step, over all ranks
    rows: slice  # of the global batch
    members: int  # samples of that micro-batch, over all ranks

    @cached_property  # asked several times a step
    def size(self) -> int:
        """Samples in it; 0 on a rank that has none."""
        return int(self.rows.stop - self.rows.start)


def micro_batches(count: int, accumulate: int, world: World, group: int = 1) -> tuple[Shard, ...]:
    """This rank's shards: its part of each of `accumulate` micro-batches of a global batch of `count` samples.

    The global batch is cut first, and each micro-batch is divided among the ranks then: so it has the same members on
    any number of ranks, and batch statistics over all ranks (`--batch-norm global`) mean the same on every N. It is cut
    between groups of `group` consecutive samples alone, of which the last may be a short one.
    """
    shards = []
    groups = -(-count // group)
    cuts = min(accumulate, groups)
    for m in range(cuts):
        micro = shard_of(groups, m, cuts)
        mine = world.shard(micro.stop - micro.start)
        start, stop = micro.start + mine.start, micro.start + mine.stop
        rows = slice(min(start * group, count), min(stop * group, count))
        members = min(micro.stop * group, count) - micro.start * group
        shards.append(Shard(m, m * world.size + world.rank, rows, members))
    return tuple(shards)


def slices(count: int, total: int, world: World, level: bool = False) -> tuple[Shard, ...]:
    """This rank's slices of a global batch of `count` samples cut into `total`: whole ones, one after the other.

    `level`: as many on every rank, by one without a sample where others have one more.
    """
    cuts = min(total, count)
    mine = ((v, shard_of(count, v, cuts)) for v in range(cuts)[world.shard(cuts)])
    shards = [Shard(v, v, rows, rows.stop - rows.start) for v, rows in mine]
    if level and len(shards) < -(-cuts // world.size):
        shards.append(Shard(total, total + world.rank, slice(count, count), 0))
    return tuple(shards)
