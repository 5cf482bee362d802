"""From the order to batches on the device: how samples are read, who takes which, and what is prepared ahead."""

import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.data.augment import Augment, Mixing, Pairs, pairs
from lockstep.data.image_sets import ArraySet, ImageSet, table_on
from lockstep.data.order import Order, Shard, micro_batches, slices
from lockstep.distributed.devices import has_streams, to_device
from lockstep.distributed.loader_workers import LoaderWorkers
from lockstep.distributed.world import World, pretended_rank
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.data.transforms import Transforms  # imports torchvision, 1.5 s

Tensors = tuple[Tensor, ...]
Request = tuple[np.ndarray, int | None]  # sample numbers (see `Samples`), epoch (None: evaluation)
Read = Callable[[Iterable[Request]], Iterator[tuple[Tensor, Tensor, Tensor]]]  # images, labels, ids on the device
_TOGETHER_BYTES = 1 << 16  # of samples that are read, and of batches that are made, in one go
_MOST_TOGETHER = 255  # requests beside the first, also where they ask for nothing
_CACHE_LINE = 64


class Samples:
    """A set's samples by their numbers: i + k n, of a set of n, is sample i as it comes for another time.

    A set whose `read` draws takes `draws`, the numbers, beside the ids, so that each time has draws of its own; by them
    those of the transforms are keyed too.
    """

    def __init__(self, images: ImageSet, transforms: "Transforms | None" = None) -> None:
        self.images, self.transforms = images, transforms
        self.draws = "draws" in inspect.signature(images.read).parameters

    def read(self, numbers: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Images and labels, transformed where this is no evaluation."""
        if not len(numbers) or int(numbers.max()) < (n := len(self.images)):
            pixels, labels = self.images.read(numbers, epoch)
        else:
            again: Any = {"draws": numbers} if self.draws else {}
            pixels, labels = self.images.read(numbers % n, epoch, **again)
        return pixels if self.transforms is None or epoch is None else self.transforms(pixels, numbers, epoch), labels

    def __call__(self, request: Request) -> tuple[Tensor, Tensor, Tensor]:
        """The answer to a request, in whichever process: images, labels, sample numbers."""
        return *self.read(*request), torch.from_numpy(request[0])


def resident(images: ArraySet, device: torch.device, transforms: "Transforms | None" = None) -> Read:
    """Read from memory: the page cache on a CPU (shared by the host's ranks), a copy on the device otherwise.

    Transforms work on the CPU, so with them the pages are read for any device.
    """
    n = len(images)
    if device.type == "cpu" or transforms is not None:
        read = Samples(images, transforms).read
        sample_bytes = math.prod(images.shape) * images.images[0].itemsize
        if transforms is not None:
            sample_bytes = _TOGETHER_BYTES  # they get what is asked for, no more

        def from_pages(requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for numbers, epoch, sizes in _together(requests, sample_bytes):
                pixels, classes = (to_device(each, device) for each in read(numbers, epoch))
                ids = to_device(torch.from_numpy(numbers), device)
                if len(sizes) == 1:
                    yield pixels, classes, ids
                else:
                    yield from zip(
                        _cut(pixels, sizes), torch.split(classes, sizes), torch.split(ids, sizes), strict=True
                    )

        return from_pages
    pixels, classes = (tensor.to(device) for tensor in images.load_all())

    def from_device(requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for numbers, _ in requests:
            ids = to_device(torch.from_numpy(numbers), device)
            rows = ids if not len(numbers) or int(numbers.max()) < n else ids % n
            yield pixels.index_select(0, rows), classes.index_select(0, rows), ids

    return from_device


def _together(requests: Iterable[Request], sample_bytes: int) -> Iterator[tuple[np.ndarray, int | None, list[int]]]:
    """Requests of one epoch, small ones joined: their numbers, the epoch, and how many of them each asked for."""
    rest = iter(requests)
    for numbers, epoch in rest:
        room = _TOGETHER_BYTES // (sample_bytes * max(1, len(numbers))) - 1
        joined = [numbers, *(more for more, _ in islice(rest, min(max(0, room), _MOST_TOGETHER)))]
        yield np.concatenate(joined) if len(joined) > 1 else numbers, epoch, [len(each) for each in joined]


def _cut(pixels: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Images in batches. Floating-point ones reach the model as they lie here, so each begins a cache line: what a
    kernel computes may depend on that."""
    parts: Sequence[Tensor] = torch.split(pixels, sizes)
    if not pixels.is_floating_point():
        return parts
    return [part.clone() if part.storage_offset() * part.itemsize % _CACHE_LINE else part for part in parts]


def streaming(images: ImageSet, device: torch.device, workers: int, transforms: "Transforms | None" = None) -> Read:
    """Read through `workers` processes that stay alive between epochs (0: in this process)."""
    task = Samples(images, transforms)
    pool = LoaderWorkers(workers, task, images.name, pin=has_streams(device)) if workers else None

    # Nothing here may be part of a reference cycle: the workers would live until it is collected.
    def read(requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for answer in pool.map(requests) if pool else map(task, requests):
            pixels, classes, ids = (
                tensor.to(device, non_blocking=True) if pool else to_device(tensor, device) for tensor in answer
            )
            yield pixels, classes, ids

    return read


def reader(
    images: ImageSet, device: torch.device, loader: str = "auto", workers: int = 0,
    transforms: "Transforms | None" = None,
) -> Read:  # fmt: skip
    """How a set's samples are read: resident where it is an array that fits the device, else streaming.

    Transforms beside an accelerator are the workers': in this process they would keep it waiting.
    Raises UserError for `loader="resident"` with a set that is no array.
    """
    if loader == "resident" and not isinstance(images, ArraySet):
        what = f"--loader resident: the images of {images.name} are no array of one shape"
        raise UserError(what, "Use --loader streaming with --workers.")
    beside = transforms is not None and device.type != "cpu"
    here = loader == "resident" or (loader == "auto" and not beside)
    if isinstance(images, ArraySet) and here and (loader == "resident" or _fits(images, device)):
        return resident(images, device, transforms)
    return streaming(images, device, workers, transforms)


def _fits(images: ArraySet, device: torch.device) -> bool:
    return device.type == "cpu" or images.nbytes < torch.accelerator.get_memory_info(device)[0] // 2  # no copy there


@cache  # one for each device: the allocator keeps what it freed apart by stream, and every other one would add its own
def _side(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _current(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def prefetch(batches: Iterator[Tensors], device: torch.device) -> Iterator[Tensors]:
    """The same batches, each taken from `batches` one step early, its work on a stream of its own.

    So the copies and kernels of batch k + 1 are in the device's queues before step k, and run beside it even where the
    step ends by waiting for the device, as fp16's scaler does. `batches` puts the work that makes a batch on the
    current stream of `device`; without streams the batches just pass through.
    """
    if not has_streams(device):
        yield from batches
        return
    side = _side(device)
    # what batches are made of may be on its way to the device still
    side.wait_stream(_current(device))

    def prepare() -> tuple[Tensors, torch.Event] | None:
        with side:
            batch = next(batches, None)
            return None if batch is None else (batch, side.record_event())

    coming = prepare()
    while coming is not None:
        (batch, ready), coming = coming, prepare()
        stream = _current(device)
        stream.wait_event(ready)
        for tensor in batch:
            # allocated on the side stream, which could else give its memory to a later batch while this one is read
            tensor.record_stream(stream)
        yield batch


@dataclass(slots=True)  # not frozen: that would take three times as long to make
class Batch:
    """This rank's part of one step's global batch."""

    images: Tensor  # float32 [b, C, H, W] on the device, the shards one after the other
    labels: Tensor  # int64 [b]; of several labels a picture, and of mixed ones: float32 [b, classes]
    shards: tuple[Shard, ...]  # of this rank, a forward pass each; their sizes add up to b, zeros allowed
    all_ids: np.ndarray  # int64 [B], the whole global batch; i + k n: sample i of n for another time
    epoch: int
    step: int  # over the whole run
    samples: int  # seen by all ranks before this step
    _loaded: object = field(default=None, repr=False, compare=False)
    _alone: Callable[[int], Tensor] | None = field(default=None, repr=False, compare=False)

    def _contents(self) -> object:
        return id(self.images), self.images._version, id(self.labels), self.labels._version

    @property
    def changed(self) -> bool:
        """Whether other images or labels have been put into a loader's batch, or written into its own."""
        return self._loaded not in (None, self._contents())

    @property
    def count(self) -> int:
        """Samples in the global batch."""
        return len(self.all_ids)

    @property
    def ids(self) -> np.ndarray:
        """int64 [b]: of the images, on this rank."""
        return np.concatenate([self.all_ids[:0], *(self.all_ids[shard.rows] for shard in self.shards)])


def last_again(batch: Batch) -> tuple[str, str]:
    """Its last sample, and why that has another image where it is made once more: by itself, and as on the second of
    two processes, or if there are several as on one. "" where it has not, or can't be made."""
    rows = [shard.rows for shard in batch.shards if shard.size]
    if batch._alone is None or batch.changed or not rows:
        return "", ""
    row, cause = rows[-1].stop - 1, ""
    for there in pretended_rank(*((0, 0) if dist.is_initialized() else (1, 2))), nullcontext():
        with there:
            again = batch._alone(row)
        if torch.allclose(batch.images[-1:], again, 1e-3, 1e-3, equal_nan=True):
            cause = cause and "an image is another one by the process's rank, or their number:"
            break
        cause = "an image is another one in its batch than made by itself:"
    return f"sample {batch.all_ids[row]}", cause


class TrainLoader:
    """The training set in the run's order. `loader.epoch(e, start)` yields a Batch for each step from `start` on.

    Each batch is cut into `accumulate` micro-batches, between groups of `group` samples, or for exact mode into `exact`
    slices, on all ranks as many where `level` is set. `mixing`: mixup and CutMix, after augmentation.
    """

    def __init__(
        self, images: ImageSet, order: Order, augment: Augment, world: World, read: Read, accumulate: int = 1,
        exact: int = 0, group: int = 1, level: bool = False, mixing: Mixing | None = None,
    ) -> None:  # fmt: skip
        self.images, self.order, self.augment, self.world, self.read = images, order, augment, world, read
        self.mixing, sets = mixing, table_on(images, world.device)
        self._sets = None if sets is None else sets.float()  # float32 [sets, classes], of a label its classes
        self.shards: Callable[[int], tuple[Shard, ...]] = (  # this rank's, of a global batch of so many samples
            partial(slices, total=exact, world=world, level=level)
            if exact
            else partial(micro_batches, accumulate=accumulate, world=world, group=group)
        )
        self.wait_ms = 0.0  # time that who takes the batches stood waiting for them, over all epochs

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.order.steps_per_epoch

    def __iter__(self) -> NoReturn:
        what = "a training loader gives its batches epoch by epoch: the order is a function of seed and epoch"
        raise UserError(what, "for e in range(epochs): for batch in loader.epoch(e): ... (there is no set_epoch).")

    def set_epoch(self, _: int) -> NoReturn:
        """As torch's sampler has it: refused, with what to write instead."""
        self.__iter__()

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
        planned = deque[tuple[np.ndarray, tuple[Shard, ...]]]()  # steps asked for and not yet delivered, in order
        steps, cut = self.order.steps(epoch, start), lru_cache(self.shards)  # two counts an epoch at most
        mixing = self.mixing
        paired = lru_cache(lambda count: pairs(cut(count), count))
        mixed = deque[Pairs]()  # of the steps asked for and not yet made

        def requests() -> Iterator[Request]:  # without self, which holds who reads this: see streaming
            for ids in steps:
                shards = cut(len(ids))
                planned.append((ids, shards))
                if mixing is not None:
                    mixed.append(paired(len(ids)))
                    yield ids[mixed[-1].positions], epoch
                elif len(shards) == 1:
                    yield ids[shards[0].rows], epoch
                else:  # a rank without a shard asks for no sample, and its turn must not be lost
                    yield np.concatenate([ids[:0], *(ids[shard.rows] for shard in shards)]), epoch

        batches, augment, sets = self.read(requests()), self.augment, self._sets
        made = ((augment(images, mine, epoch), labels) for images, labels, mine in batches)
        if mixing is None and sets is not None:
            made = ((images, sets[labels]) for images, labels in made)
        if mixing is not None:
            firsts = range(start * self.order.batch_size, 1 << 62, self.order.batch_size)
            made = (mixing(*each, mixed.popleft(), epoch, at) for at, each in zip(firsts, made, strict=False))
        prepared = prefetch(made, self.world.device)
        own_bytes = self.order.batch_size // self.world.size * math.prod(self.images.shape) * 4
        prepared = several_at_once(prepared, _TOGETHER_BYTES // max(1, own_bytes))
        for t in range(start, len(self)):
            began = time.perf_counter()
            images, labels = next(prepared)
            ids, shards = planned.popleft()
            self.wait_ms += (time.perf_counter() - began) * 1e3
            step, samples = epoch * len(self) + t, epoch * self.order.samples_per_epoch + t * self.order.batch_size
            batch = Batch(images, labels, shards, ids, epoch, step, samples)
            batch._loaded = batch._contents()  # dataclasses.replace takes it along
            if mixing is None and not hasattr(self.images, "dataset"):  # others' sets are looked at before a run
                batch._alone = partial(self._image, ids, epoch)
            yield batch

    def _image(self, ids: np.ndarray, epoch: int, row: int) -> Tensor:
        """The image of one row of a global batch."""
        images, _, mine = next(iter(self.read([(ids[row : row + 1], epoch)])))
        return self.augment(images, mine, epoch)


def several_at_once(items: Iterator[Any], count: int) -> Iterator[Any]:
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

    def first(self) -> Tensor:
        """A chunk of the set's first image alone, [1, C, H, W]."""
        images, _, ids = next(iter(self.read([(np.zeros(1, np.int64), None)])))
        return self.augment(images, ids, None)

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """This rank's (chunk number, images float32 [b, C, H, W], labels int64 [b])."""
        mine = range(self.chunks)[self.world.shard(self.chunks)]
        n, size = len(self.images), self.batch_size
        requests = ((np.arange(chunk * size, min(n, (chunk + 1) * size)), None) for chunk in mine)
        for chunk, (images, labels, ids) in zip(mine, self.read(requests), strict=True):
            yield chunk, self.augment(images, ids, None), labels
