"""Orders in which a sample may come several times: classes in equal shares, and repeated augmentation.

A sample that comes for the k-th time (from 0) has the number id + k n, by which its draws are keyed; see readers.py.
Which samples a step has is still a function of (seed, epoch, step): each position is computed by keyed permutations.

Balance: an epoch has a fixed count of draws of each class, in a permuted order. Every class's samples are walked
through without replacement, permuted anew for each round, and the walk goes on from epoch to epoch: after any number of
epochs two samples of a class have come equally often, but for one. Memory: an index of the samples by class, none where
they lie class by class as in a folder.

Repeats: Hoffer et al., "Augment Your Batch", CVPR 2020. A batch of B holds B / R samples, each R times, B / R positions
apart so that neighbours, which mixup takes for pairs, are different ones.
"""

from typing import Literal

import numpy as np

from lockstep.data.arrays import Ids, ImageSet
from lockstep.data.label_sets import label_sets
from lockstep.data.order import Order, permute
from lockstep.errors import UserError
from lockstep.randomness import bits_np, stream

Balance = Literal["none", "equal", "sqrt"]
_ROUNDS = 16  # of the network: classes may be small, and then fewer leave some permutations rarer


class RepeatedOrder(Order):
    """Sample numbers of every step.

    Args:
        n, batch_size, seed, fraction, drop_last: as of Order.
        repeats: how often each sample comes in its batch; divides `batch_size`.
        classes: what is balanced (None: nothing).
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        seed: int,
        fraction: float = 1.0,
        drop_last: bool = False,
        repeats: int = 1,
        classes: "Classes | None" = None,
    ) -> None:
        super().__init__(n, batch_size, seed, fraction)
        self.repeats, self.classes = repeats, classes
        self.draws = classes.draws if classes is not None else -(-self.used // repeats)  # different ones an epoch
        self._whole, self._per_step = self.draws, batch_size // repeats
        if drop_last:
            self._whole = self.draws // self._per_step * self._per_step
        if not self._whole:
            raise UserError(
                f"--drop-last leaves nothing: {self.draws} samples of an epoch, {repeats} times each, do not fill one "
                f"batch of {batch_size}",
                "Use a smaller --batch-size, or keep the short batch.",
            )
        self.samples_per_epoch = self._whole * repeats
        self.steps_per_epoch = -(-self._whole // self._per_step)

    @property
    def note(self) -> str:
        """For the run's start: what an epoch is."""
        parts = [self.classes.note] if self.classes is not None else []
        if self.repeats > 1:
            parts.append(f"each of {self._whole:,} draws {self.repeats} times in its batch")
        return f"an epoch is {self.samples_per_epoch:,} images: {'; '.join(parts)}"

    def _computed(self, epoch: int, t: int) -> np.ndarray:
        start, end = t * self.batch_size, min((t + self.together) * self.batch_size, self.samples_per_epoch)
        step, position = np.divmod(np.arange(start, end), self.batch_size)
        first = step * self._per_step
        here = np.minimum(self._per_step, self._whole - first)  # of the step's different samples
        ids, rounds = self._drawn(epoch, first + position % here)
        return np.asarray(ids + self.n * (rounds * self.repeats + position // here))

    def _drawn(self, epoch: int, slots: Ids) -> tuple[Ids, Ids]:
        """Sample ids of these draws of an epoch, and in which round through the set or the class each of them is."""
        if self.classes is not None:
            return self.classes.drawn(epoch, permute(slots, self.draws, stream(self.seed, "order", epoch)))
        # the walk through the set goes on where the last epoch ended
        rounds, places = np.divmod(epoch * self._whole + slots, self.used)
        ids = np.empty(len(slots), np.int64)
        for number in np.unique(rounds):
            mine = rounds == number
            ids[mine] = permute(places[mine], self.used, stream(self.seed, "order", int(number)))
        return (permute(ids, self.n, self.subset_key) if self.used < self.n else ids), rounds


class Classes:
    """The samples by class, and how many draws each class has in an epoch.

    Args:
        labels: int64 [n] of the whole set.
        ids: the samples to use (None: all).
        count: how many classes there are.
        seed: the run's.
        balance: "equal", or "sqrt": a class's share is as the square root of how many samples it has.
        repeats: how often each draw comes: an epoch has as many fewer of them.
    """

    def __init__(
        self, labels: Ids, ids: Ids | None, count: int, seed: int, balance: Balance = "equal", repeats: int = 1
    ) -> None:
        mine = labels if ids is None else labels[ids]
        sizes = np.bincount(mine, minlength=count)
        self.present = np.flatnonzero(sizes)
        self.sizes = sizes[self.present]  # int64 [c]
        shares = np.sqrt(self.sizes) if balance == "sqrt" else np.ones(len(self.sizes))
        self.counts = np.maximum(1, np.rint(len(mine) / repeats * shares / shares.sum())).astype(
            np.int64
        )  # draws an epoch
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
    """`order.permute`, with a range and a key for each position.

    Args:
        positions: int64 [b], each in [0, n) of its own n, int64 [b] below 2**52.
        keys: uint64 [b].
    """
    a = np.ceil(np.sqrt(n)).astype(np.uint64)
    a += a % np.uint64(2)
    b = (n.astype(np.uint64) + a - np.uint64(1)) // a
    out = positions.astype(np.uint64)
    over = np.arange(len(out))
    while over.size:
        out[over] = _network(out[over], a[over], b[over], keys[over])
        over = over[out[over] >= n[over].astype(np.uint64)]
    return out.astype(np.int64)


def _network(x: np.ndarray, a: np.ndarray, b: np.ndarray, keys: np.ndarray) -> np.ndarray:
    left, right = np.divmod(x, b)
    for number in range(_ROUNDS):
        # a key of its own for each round and position; the digit is what is hashed
        key = keys + np.uint64(number)
        if number % 2 == 0:
            left = (left + _scaled(bits_np(0, bits_np(0, key) ^ right), a)) % a
        else:
            right = (right + _scaled(bits_np(0, bits_np(0, key) ^ left), b)) % b
    return np.asarray(left * b + right)


def _scaled(noise: np.ndarray, base: np.ndarray) -> np.ndarray:
    return np.asarray(((noise >> np.uint64(32)) * base) >> np.uint64(32))


def labels_of(images: ImageSet, flag: str) -> Ids:
    """The labels of all samples of a set, int64 [n], without reading an image.

    Raises:
        UserError: for a set that does not hold them, naming the flag that asks for them.
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
        raise UserError(
            f"{flag}: {images.name} does not say which class each of its {len(images):,} samples has",
            "Give the Dataset an attribute `targets` (an ImageSet: `labels`), a whole number for each sample.",
        )
    return labels.astype(np.int64, copy=False)
