"""From the order to batches on the device: the resident loader (in memory) and the streaming one (worker processes)."""

import math
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.ahead import ahead, has_streams, to_device
from lockstep.data.augment import Augment
from lockstep.data.sources import ArraySet, ImageSet
from lockstep.errors import UserError
from lockstep.lifetime import serve
from lockstep.order import Order
from lockstep.world import World, share_of

Request = tuple[np.ndarray, int | None]  # sample ids, epoch (None: evaluation)
_T = TypeVar("_T")
_TOGETHER_BYTES = 1 << 16  # of batches that are made in one go


@dataclass(slots=True)  # not frozen: that would take three times as long to make
class Batch:
    """This rank's part of one step's global batch."""

    images: Tensor  # float32 [b, C, H, W] on the device, the pieces one after the other
    labels: Tensor  # int64 [b]
    sizes: tuple[int, ...]  # samples of each piece, a forward pass each; sum = b, zeros allowed
    keys: tuple[int, ...]  # what each piece is called, for its dropout
    ids: np.ndarray  # int64 [B], the whole global batch
    epoch: int
    step: int  # over the whole run
    samples: int  # seen by all ranks before this step

    @property
    def count(self) -> int:
        """Samples in the global batch."""
        return len(self.ids)


@dataclass(frozen=True)
class Piece:
    """A run of the global batch that this rank takes through the model in one pass."""

    key: int
    rows: slice


def micro_batches(count: int, accumulate: int, world: World) -> list[Piece]:
    """This rank's share of each of `accumulate` micro-batches of a global batch of `count` samples.

    The global batch is cut first and each micro-batch shared out then, so that a micro-batch has the same members on
    any number of ranks: batch statistics over all ranks (`sync_bn`) mean the same on every N.
    """
    pieces = []
    cuts = min(accumulate, count)
    for m in range(cuts):
        micro = share_of(count, m, cuts)
        mine = world.share(micro.stop - micro.start)
        pieces.append(Piece(m * world.size + world.rank, slice(micro.start + mine.start, micro.start + mine.stop)))
    return pieces


def shards(count: int, total: int, world: World) -> list[Piece]:
    """This rank's shards of a global batch of `count` samples cut into `total`: whole ones, one after the other."""
    cuts = min(total, count)
    return [Piece(v, share_of(count, v, cuts)) for v in range(cuts)[world.share(cuts)]]


Fetch = Callable[[Iterable[Request]], Iterator[tuple[Tensor, Tensor, Tensor]]]  # images, labels, ids on the device


class TrainLoader:
    """The training set in the run's order. `loader.epoch(e, start)` yields a Batch for each step from `start` on."""

    def __init__(
        self, images: ImageSet, order: Order, augment: Augment, world: World, fetch: Fetch, accumulate: int = 1
    ) -> None:
        self.images, self.order, self.augment, self.world, self.fetch = images, order, augment, world, fetch
        self.pieces: Callable[[int], list[Piece]] = lambda count: micro_batches(count, accumulate, world)
        self.wait_ms = 0.0  # time that the training loop stood waiting for data, since somebody set it to zero

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.order.steps_per_epoch

    def epochs(self, count: int) -> Iterator[Iterator[Batch]]:
        """One iterator of batches for each of `count` epochs."""
        return (self.epoch(e) for e in range(count))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from step `start` on."""
        planned: deque[tuple[np.ndarray, list[Piece]]] = deque()  # steps asked for and not yet delivered, in order
        steps, cut = self.order.steps(epoch, start), lru_cache(self.pieces)  # two counts an epoch at most

        def requests() -> Iterator[Request]:  # without self, which holds who reads this: see through_workers
            for ids in steps:
                pieces = cut(len(ids))
                planned.append((ids, pieces))
                if len(pieces) == 1:
                    yield ids[pieces[0].rows], epoch
                else:  # a rank without a piece asks for no sample, and its turn must not be lost
                    yield np.concatenate([ids[:0], *(ids[piece.rows] for piece in pieces)]), epoch

        fetched, augment = self.fetch(requests()), self.augment
        prepared = ahead(
            ((augment(images, mine, epoch), labels) for images, labels, mine in fetched), self.world.device
        )
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
                sizes=tuple(piece.rows.stop - piece.rows.start for piece in pieces),
                keys=tuple(piece.key for piece in pieces),
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

    def __init__(self, images: ImageSet, augment: Augment, world: World, fetch: Fetch, batch_size: int) -> None:
        self.images, self.augment, self.world, self.fetch, self.batch_size = images, augment, world, fetch, batch_size

    @property
    def chunks(self) -> int:
        """Chunks in the whole set, over all ranks."""
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """This rank's (chunk number, images float32 [b, C, H, W], labels int64 [b])."""
        mine = range(self.chunks)[self.world.share(self.chunks)]
        n, size = len(self.images), self.batch_size
        requests = ((np.arange(chunk * size, min(n, (chunk + 1) * size)), None) for chunk in mine)
        for chunk, (images, labels, ids) in zip(mine, self.fetch(requests), strict=True):
            yield chunk, self.augment(images, ids, None), labels


def resident(images: ArraySet, device: torch.device) -> Fetch:
    """Fetch from memory: the page cache on a CPU (shared by the host's ranks), a copy on the device otherwise."""
    if device.type == "cpu":

        def from_pages(requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for ids, epoch in requests:
                yield *images.fetch(ids, epoch), torch.from_numpy(ids)

        return from_pages
    pixels, classes = (tensor.to(device) for tensor in images.load_all())

    def from_device(requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for ids, _ in requests:
            mine = to_device(torch.from_numpy(ids), device)
            yield pixels.index_select(0, mine), classes.index_select(0, mine), mine

    return from_device


def streaming(images: ImageSet, device: torch.device, workers: int) -> Fetch:
    """Fetch through `workers` processes that stay alive between epochs (0: in this process)."""
    requested = _Requested()
    context = None
    if workers:
        # fork would copy a process that runs threads (OpenMP, gloo), and a lock held by one stays locked for ever
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])  # torch is imported once, not once a worker
    loader: DataLoader[Any] = DataLoader(
        _Requestable(images),
        sampler=requested,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=has_streams(device),
        multiprocessing_context=context,
        worker_init_fn=serve,
    )

    # Nothing here may be part of a reference cycle: to collect one that holds workers takes 5 s for each of them.
    def through_workers(requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        requested.requests = requests
        for answer in loader:
            if isinstance(answer, UserError):
                try:
                    raise answer
                finally:
                    del answer  # else the error would hold the frame that holds it
            pixels, classes, ids = (tensor.to(device, non_blocking=True) for tensor in answer)
            yield pixels, classes, ids

    return through_workers


class _Requested(Sampler[Request]):
    """What the loader is asked for next; read in this process, in order."""

    requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class _Requestable(Dataset[tuple[Tensor, Tensor, Tensor] | UserError]):
    """An image set that answers a request in a worker process."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor, Tensor] | UserError:
        ids, epoch = request
        try:
            return *self.images.fetch(ids, epoch), torch.from_numpy(ids)
        except UserError as error:  # handed over and raised there: a loader would wrap it in the worker's traceback
            return error


def fetcher(images: ImageSet, device: torch.device, loader: str = "auto", workers: int = 0) -> Fetch:
    """The way to a set's samples: resident where it is an array that fits the device, else streaming.

    Raises:
        UserError: for `loader="resident"` with a set that is no array.
    """
    if loader == "resident" and not isinstance(images, ArraySet):
        raise UserError(
            f"--loader resident: the images of {images.name} are no array of one shape",
            "Use --loader streaming with --workers.",
        )
    if isinstance(images, ArraySet) and loader != "streaming" and (loader == "resident" or _fits(images, device)):
        return resident(images, device)
    return streaming(images, device, workers)


def _fits(images: ArraySet, device: torch.device) -> bool:
    if device.type == "cpu":
        return True  # nothing is copied
    free, _ = torch.accelerator.get_memory_info(device)
    return images.nbytes < free // 2
