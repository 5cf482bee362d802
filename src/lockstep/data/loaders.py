"""From the order to batches on the device: who takes which samples, and in which pieces."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.data.arrays import ImageSet
from lockstep.data.augment import Augment
from lockstep.data.mixing import Mixing, Pairs, pairs
from lockstep.data.order import Order
from lockstep.data.pieces import Piece, micro_batches, slices
from lockstep.data.prefetch import prefetch
from lockstep.data.readers import Read, Request
from lockstep.processes.world import World

_T = TypeVar("_T")
_TOGETHER_BYTES = 1 << 16  # of batches that are made in one go


@dataclass(slots=True)  # not frozen: that would take three times as long to make
class Batch:
    """This rank's part of one step's global batch."""

    images: Tensor  # float32 [b, C, H, W] on the device, the pieces one after the other
    labels: Tensor  # int64 [b]; soft ones, of mixed images, float32 [b, classes]
    pieces: tuple[Piece, ...]  # of this rank, a forward pass each; their sizes add up to b, zeros allowed
    ids: np.ndarray  # int64 [B], the whole global batch; i + k n: sample i of n for another time
    epoch: int
    step: int  # over the whole run
    samples: int  # seen by all ranks before this step

    @property
    def count(self) -> int:
        """Samples in the global batch."""
        return len(self.ids)


class TrainLoader:
    """The training set in the run's order. `loader.epoch(e, start)` yields a Batch for each step from `start` on.

    Each batch is cut into `accumulate` micro-batches, between groups of `group` samples, or for exact mode into `exact`
    slices, on all ranks as many where `level` is set. `mixing`: mixup and CutMix, after augmentation.
    """

    def __init__(
        self,
        images: ImageSet,
        order: Order,
        augment: Augment,
        world: World,
        read: Read,
        accumulate: int = 1,
        exact: int = 0,
        group: int = 1,
        level: bool = False,
        mixing: Mixing | None = None,
    ) -> None:
        self.images, self.order, self.augment, self.world, self.read = images, order, augment, world, read
        self.mixing = mixing
        self.pieces: Callable[[int], tuple[Piece, ...]] = (  # this rank's, of a global batch of so many samples
            partial(slices, total=exact, world=world, level=level)
            if exact
            else partial(micro_batches, accumulate=accumulate, world=world, group=group)
        )
        self.wait_ms = 0.0  # time that who takes the batches stood waiting for them, over all epochs

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.order.steps_per_epoch

    @property
    def notes(self) -> list[str]:
        """What a reader of the run's first lines should know of its samples."""
        own = (getattr(part, "note", "") for part in (self.order, self.mixing))
        return [*getattr(self.images, "notes", ()), *filter(None, own)]

    def epochs(self, count: int) -> Iterator[Iterator[Batch]]:
        """One iterator of batches for each of `count` epochs."""
        return (self.epoch(e) for e in range(count))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from step `start` on."""
        planned: deque[tuple[np.ndarray, tuple[Piece, ...]]] = (
            deque()
        )  # steps asked for and not yet delivered, in order
        steps, cut = self.order.steps(epoch, start), lru_cache(self.pieces)  # two counts an epoch at most
        mixing = self.mixing if self.mixing is not None and self.mixing.on(epoch) else None
        paired = lru_cache(lambda count: pairs(cut(count), count))
        mixed: deque[Pairs] = deque()  # of the steps asked for and not yet made

        def requests() -> Iterator[Request]:  # without self, which holds who reads this: see through_workers
            for ids in steps:
                pieces = cut(len(ids))
                planned.append((ids, pieces))
                if mixing is not None:
                    mixed.append(paired(len(ids)))
                    yield ids[mixed[-1].positions], epoch
                elif len(pieces) == 1:
                    yield ids[pieces[0].rows], epoch
                else:  # a rank without a piece asks for no sample, and its turn must not be lost
                    yield np.concatenate([ids[:0], *(ids[piece.rows] for piece in pieces)]), epoch

        batches, augment = self.read(requests()), self.augment
        made = ((augment(images, mine, epoch), labels) for images, labels, mine in batches)
        if mixing is not None:
            firsts = range(start * self.order.batch_size, 1 << 62, self.order.batch_size)
            made = (mixing(*each, mixed.popleft(), epoch, at) for at, each in zip(firsts, made, strict=False))
        prepared = prefetch(made, self.world.device)
        share_bytes = self.order.batch_size // self.world.size * math.prod(self.images.shape) * 4
        prepared = several_at_once(prepared, _TOGETHER_BYTES // max(1, share_bytes))
        for t in range(start, len(self)):
            began = time.perf_counter()
            images, labels = next(prepared)
            ids, pieces = planned.popleft()
            self.wait_ms += (time.perf_counter() - began) * 1e3
            yield Batch(
                images=images,
                labels=labels,
                pieces=pieces,
                ids=ids,
                epoch=epoch,
                step=epoch * len(self) + t,
                samples=epoch * self.order.samples_per_epoch + t * self.order.batch_size,
            )


def several_at_once(items: Iterator[_T], count: int) -> Iterator[_T]:
    """The same items, made `count` at a time: between two steps of a tiny model each would find the caches cold."""
    while together := list(islice(items, max(1, count))):
        yield from together


class EvalLoader:
    """A set in its own order, cut into chunks of `batch_size` that do not depend on the number of ranks.

    A rank takes whole chunks: a kernel's result depends on the shape of its batch, so whole chunks give the same bits
    on any number of ranks.
    """

    def __init__(self, images: ImageSet, augment: Augment, world: World, read: Read, batch_size: int) -> None:
        self.images, self.augment, self.world, self.read, self.batch_size = images, augment, world, read, batch_size

    @property
    def chunks(self) -> int:
        """Chunks in the whole set, over all ranks."""
        return -(-len(self.images) // self.batch_size)

    @property
    def short(self) -> bool:
        """True on a rank that has a chunk less than others."""
        return self.world.rank >= self.chunks % self.world.size > 0

    def blank(self) -> Tensor:
        """A chunk of one black image, float32 [1, C, H, W]."""
        image = torch.zeros(1, *self.images.shape, dtype=torch.uint8, device=self.world.device)
        return self.augment(image, torch.zeros(1, dtype=torch.int64), None)

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """This rank's (chunk number, images float32 [b, C, H, W], labels int64 [b])."""
        mine = range(self.chunks)[self.world.share(self.chunks)]
        n, size = len(self.images), self.batch_size
        requests = ((np.arange(chunk * size, min(n, (chunk + 1) * size)), None) for chunk in mine)
        for chunk, (images, labels, ids) in zip(mine, self.read(requests), strict=True):
            yield chunk, self.augment(images, ids, None), labels
