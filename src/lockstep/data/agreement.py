"""A data set is the same in every process that makes it, and a sample the same whoever reads it, and when.

Sets that the processes have made are compared before a run starts. Of users' own Datasets two processes read a few
samples each, in other orders. On one process too: what several would stumble on is said there in the same words.
"""

import gc
import math
import pickle
import random
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.image_sets import ArraySet, ImageSet
from lockstep.data.picture_set import PictureSet
from lockstep.distributed import loader_workers, warm
from lockstep.distributed.world import World, pretended_rank
from lockstep.errors import UserError
from lockstep.randomness import stream

Read = Callable[[np.ndarray, int | None], tuple[Tensor, Tensor]]  # ids and epoch -> images and labels
_PROBES = 32  # samples of a Dataset that are compared over the processes: it may take a decoded image each
# samples that are read several times, at least, and at most where they are small; odd numbers, so that none has its
# place in the other order too
_READ = 7, 255
_SMALL = 1 << 18  # numbers of all of these
_ROUNDING = 1e-3  # of a sample's largest value: machines' kernels may round otherwise


def require_same(
    sets: Sequence[ImageSet],
    seed: int,
    world: World,
    again: Callable[[], Sequence[ImageSet]] | None = None,
    steady: Sequence[bool] = (True, True),
) -> None:
    """Compare sets over the ranks; all call it together.

    Args:
        again: makes the sets. Another process calls it too, as the second of two or, of several, as one alone; pickle
            takes it.
        steady: of each set, whether a sample is the same whenever it is read.
    Raises UserError on all ranks, naming the set that is not the same everywhere.
    """
    again = again if again is not None and warm.at_hand() else None
    if world.size == 1 and again is None:
        return

    def made(*ranks: tuple[int, int]) -> list[list[list[Any]]]:
        """What other processes make as such ranks of so many; the same on all ranks, as rank 0 asks for it."""
        found = []
        if world.rank == 0 and again is not None:
            tasks = [partial(_make, again, seed, [*steady], torch.get_default_dtype(), *each) for each in ranks]
            try:
                found = [*map(loader_workers.result, [loader_workers.begin(task) for task in tasks])]
            except EOFError:  # as where there is memory for one of the two
                warnings.warn("the data set was not compared: the process that made it again was killed", stacklevel=2)
        everyones: list[list[list[Any]]] = world.gather(found)[0]
        return everyones

    everyone = world.gather(_contents(sets, seed, world.local_rank, steady))
    everyone += made((1, 2) if world.size == 1 else (0, 0))
    for number, each in enumerate(sets):
        first = everyone[0][number]
        other = next((k for k, theirs in enumerate(everyone) if _differs(theirs[number], first)), None)
        if other is not None:
            alone, *others = [found[number] for found in made((0, 0), (1, 2), (0, 0))] or [first]
            if others and _differs(alone, others[0]) and not _differs(alone, others[1]):
                raise UserError(
                    f"{each.name} is not the same set on one process and on several: {alone[0]:,} samples on one, "
                    f"{others[0][0]:,} in the second of two processes, and they differ",
                    "Let the factory make the whole set, whatever its rank and their number: each process takes its "
                    "part of every batch.",
                )
            raise UserError(
                f"{each.name} is not the same set in every process: {first[0]:,} samples in process 0 and "
                f"{everyone[other][number][0]:,} in process {max(1, other % world.size)}, of which some differ",
                "Give every machine the same copy of the data. Where a factory of your own makes the set, each process "
                "calls it: split by a generator with a fixed seed, sort what the file system lists, and draw nothing "
                "from the time or the process id.",
            )


def _contents(sets: Sequence[ImageSet], seed: int, local_rank: int, steady: Sequence[bool]) -> list[list[Any]]:
    """Of each set its length, its digest, and of some samples labels and how large they are. JSON takes it."""
    with seeded(seed):
        # another process of this machine looks at the same files: one of them is enough
        known = [local_rank > 0 and isinstance(each, PictureSet) for each in sets]
        return [
            [len(each), "" if known[k] else each.fingerprint, *_some(each, steady[k])] for k, each in enumerate(sets)
        ]


def _make(
    make: Callable[[], Sequence[ImageSet]], seed: int, steady: Sequence[bool], dtype: torch.dtype, rank: int, size: int
) -> list[list[Any]]:
    """The contents of sets that another process makes, as rank `rank` of `size`."""
    torch.set_default_dtype(dtype)  # a script may have set it after the parent of this process was forked
    with pretended_rank(rank, size):
        return _contents(make(), seed, 0, steady)


def _differs(one: list[Any], other: list[Any]) -> bool:
    """Whether two sets are others. A digest that one of them lacks says nothing."""
    if one[0] != other[0] or one[2] != other[2] or bool(one[1] and other[1] and one[1] != other[1]):
        return True
    return any(abs(a - b) > _ROUNDING * max(a, b) for a, b in zip(one[3], other[3], strict=True))


def _some(images: ImageSet, steady: bool) -> tuple[list[int], list[float]]:
    """Labels, and mean and root mean square of absolute pixels, of some samples all over a set that has no digest.

    Of one that isn't steady the labels alone, if these are the same a second time.
    """
    if not hasattr(images, "dataset"):
        return [], []
    ids = np.unique(np.linspace(0, len(images) - 1, _PROBES).astype(np.int64))
    pixels, labels = images.read(ids, None)
    if not steady:
        return labels.tolist() if torch.equal(labels, images.read(ids, None)[1]) else [], []
    flat = pixels.double().abs().flatten(1)
    return labels.tolist(), torch.cat([flat.mean(1), flat.square().mean(1).sqrt()]).tolist()


def unsteady(sets: Sequence[ImageSet], world: World, augmented: Read | None = None, by: str = "") -> list[str]:
    """For each set why a sample of it is not always the same, and "" where none was seen; on all ranks alike.

    The first set is read as in training, the others as in evaluation. Looked at are users' own sets, as far as pickle
    takes them: rank 0 has two processes read some samples, one of them backwards.

    Args:
        augmented: reads the first set, whichever it is, by transforms of a user's own, which `by` names.
    """
    found = [""] * len(sets)
    own = [k for k, each in enumerate(sets) if not isinstance(each, ArraySet | PictureSet) or (augmented and k == 0)]
    if own and world.rank == 0 and warm.at_hand():
        for k in own:
            later = int(hasattr(sets[k], "dataset"))  # what is cached would be drawn otherwise; others may go by epoch
            what, epochs = ("weights", (0, later)) if k == 0 else ("metrics", (None, None))
            read, name = (augmented, sets[k].name + by) if k == 0 and augmented else (sets[k].read, sets[k].name)
            found[k] = _unsteady(sets[k], read, name, what, epochs)
    everyones: list[str] = world.gather(found)[0]
    return everyones


def _unsteady(images: ImageSet, read: Read, name: str, what: str, epochs: tuple[int | None, ...]) -> str:
    count = max(_READ[0], min(_READ[1], _SMALL // max(1, math.prod(images.shape)) - 1 | 1))
    ids = np.unique(np.linspace(0, len(images) - 1, count).astype(np.int64))
    forwards, backwards = partial(_read, read, ids, epochs), partial(_read, read, ids[::-1].copy(), epochs[::-1])
    try:
        tasks = [partial(forwards, 0, 0), partial(backwards, 1, 2)]
        (first, draws), (second, _) = map(loader_workers.result, map(loader_workers.begin, tasks))
    except Exception:  # no other process can read it; what is wrong with a sample is said where it is used
        return ""
    *rows, once_more = first
    place = _other(rows, [part[::-1] for part in second[-2::-1]])
    if place is None and _other([rows[-1][-len(once_more) :]], [once_more]) is not None:
        place = -1
    differ = f"{what} will differ with the number of processes"
    remedy = "Draw by torch's, numpy's or Python's own functions, whose generators are seeded for each sample, "
    remedy += "and keep nothing of what is drawn"
    if place is None and draws:  # what is drawn may decide on one sample of a thousand
        return f"{differ}: {name} draws from a generator that goes on from sample to sample. {remedy}"
    if place is None:
        return ""
    tasks = [tasks[0], partial(forwards, 1, 2)]
    (again, _), (of_two, _) = map(loader_workers.result, map(loader_workers.begin, tasks))
    cause = "depends on what was read before it, as by a generator, a counter or a cache of its own"
    if _other(first, again) is not None:
        cause = "depends on the process that reads it, or on the time"
    elif _other(first, of_two) is not None:
        cause = "depends on the rank of the process that reads it, or on their number"
        remedy = "Let __getitem__ give the same, whoever reads it"
    return f"{differ}: sample {ids[place]} of {name} {cause}. {remedy}"


def _read(
    read: Read, ids: np.ndarray, epochs: Sequence[int | None], rank: int, size: int
) -> tuple[list[np.ndarray], bool]:
    """Some samples in each of some epochs, and at last the last one once more, which a short cache may have kept; as
    rows [k, n + 1] of pixels and the label, as rank `rank` of `size`. And whether that one leaves a generator of the
    set's elsewhere than the first time."""

    def rows(some: np.ndarray, epoch: int | None) -> np.ndarray:
        pixels, labels = read(some, epoch)
        return torch.cat([pixels.double().flatten(1), labels.double().view(-1, 1)], 1).cpu().numpy()

    with pretended_rank(rank, size):
        found = [rows(ids, epoch) for epoch in epochs]
        before = pickle.dumps(own := _generators_in(read))
        found.append(rows(ids[-1:], epochs[-1]))
        return found, pickle.dumps(own) != before


_GENERATORS = torch.Generator, random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator


def _generators_in(value: Any) -> list[Any]:
    """The random generators that an object reaches, also through libraries' objects; not by a function's globals."""
    found, seen, rest = [], {id(value)}, [value]
    while rest:
        value = rest.pop()
        if isinstance(value, _GENERATORS):
            found.append(value)
            continue
        if isinstance(value, types.FunctionType):
            parts = [value.__closure__, value.__defaults__, value.__kwdefaults__]
        else:
            parts = [] if isinstance(value, type | types.ModuleType) else gc.get_referents(value)
        # Python does not track a dict of what it does not track, as numpy's generators
        new = [p for p in parts if id(p) not in seen and (gc.is_tracked(p) or isinstance(p, (*_GENERATORS, dict)))]
        seen.update(map(id, new))
        rest += new
    return found


def _other(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> int | None:
    """The place of a sample that was read otherwise."""
    for a, b in zip(some, others, strict=True):
        largest = np.maximum(abs(a), abs(b))[:, :-1].max(1, keepdims=True)
        apart = (abs(a - b)[:, :-1] > _ROUNDING * largest).any(1) | (a[:, -1] != b[:, -1])
        if apart.any():
            return int(apart.nonzero()[0][0])
    return None


@contextmanager
def generators(everyones: bool, threads: int = 1) -> Iterator[Callable[[int, bool], None]]:
    """Within, `seed(value, everyones)` seeds torch's generator, and with `everyones` Python's and NumPy's as well.

    All are put back afterwards. One intra-op thread: pictures are small, and sums in a convolution would depend on
    their number.
    """
    torchs, before = torch.default_generator, torch.get_num_threads()
    state = torchs.get_state()
    others = (random.getstate(), np.random.get_state()) if everyones else None

    def seed(value: int, everyones: bool) -> None:
        torchs.manual_seed(value)
        if everyones:
            random.seed(value)
            np.random.seed(value & 0xFFFFFFFF)

    torch.set_num_threads(threads)
    try:
        yield seed
    finally:
        torch.set_num_threads(before)
        torchs.set_state(state)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within, torch, numpy and Python draw what the run's seed says, on every rank alike; afterwards as before."""
    with generators(True, torch.get_num_threads()) as put:
        put(stream(seed, "data"), True)
        yield
