"""How a loader gets its samples: out of memory (resident), or through worker processes (streaming)."""

import inspect
import math
import multiprocessing
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.arrays import ArraySet, ImageSet
from lockstep.errors import UserError
from lockstep.processes.devices import has_streams, to_device
from lockstep.processes.memory import free_bytes
from lockstep.processes.signals import init_loader_worker, start_helpers

if TYPE_CHECKING:
    from lockstep.data.transforms import Transforms  # imports torchvision, 1.5 s

_TOGETHER_BYTES = 1 << 16  # of samples that are read in one go
_MOST_TOGETHER = 255  # requests beside the first, also where they ask for nothing
_CACHE_LINE = 64
Request = tuple[np.ndarray, int | None]  # sample numbers (see `answerer`), epoch (None: evaluation)
Read = Callable[[Iterable[Request]], Iterator[tuple[Tensor, Tensor, Tensor]]]  # images, labels, ids on the device


def answerer(
    images: ImageSet, transforms: "Transforms | None" = None
) -> Callable[[np.ndarray, int | None], tuple[Tensor, Tensor]]:
    """What reads samples by their numbers: number i + k n, of a set of n, is sample i as it comes for another time.

    A set whose `read` draws takes `draws`, the numbers, beside the ids, so that each time has draws of its own; by them
    those of the transforms are keyed too.
    """
    n, draws = len(images), "draws" in inspect.signature(images.read).parameters

    def read(numbers: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        if _are_ids(numbers, n):
            return images.read(numbers, epoch)
        again = {"draws": numbers} if draws else {}
        return images.read(numbers % n, epoch, **again)

    def answer(numbers: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        pixels, labels = read(numbers, epoch)
        return pixels if transforms is None or epoch is None else transforms(pixels, numbers, epoch), labels

    return answer


def _are_ids(numbers: np.ndarray, n: int) -> bool:
    return not len(numbers) or int(numbers.max()) < n


def resident(images: ArraySet, device: torch.device, transforms: "Transforms | None" = None) -> Read:
    """Read from memory: the page cache on a CPU (shared by the host's ranks), a copy on the device otherwise.

    Transforms work on the CPU, so with them the pages are read for any device.
    """
    if device.type == "cpu" or transforms is not None:
        answer = answerer(images, transforms)
        # transforms get what is asked for, no more
        sample_bytes = (
            _TOGETHER_BYTES if transforms is not None else math.prod(images.shape) * images.images[0].itemsize
        )

        def from_pages(requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for numbers, epoch, sizes in _together(requests, sample_bytes):
                pixels, classes = answer(numbers, epoch)
                mine = to_device(torch.from_numpy(numbers), device)
                pixels, classes = to_device(pixels, device), to_device(classes, device)
                if len(sizes) == 1:
                    yield pixels, classes, mine
                else:
                    yield from zip(
                        _cut(pixels, sizes), torch.split(classes, sizes), torch.split(mine, sizes), strict=True
                    )

        return from_pages
    pixels, classes = (tensor.to(device) for tensor in images.load_all())
    n = len(images)

    def from_device(requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for numbers, _ in requests:
            mine = to_device(torch.from_numpy(numbers), device)
            ids = mine if _are_ids(numbers, n) else mine % n
            yield pixels.index_select(0, ids), classes.index_select(0, ids), mine

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
    requested = _RequestSampler()
    context = None
    if workers:
        # fork would copy a process that runs threads (OpenMP, gloo), and a lock held by one stays locked for ever
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])  # torch is imported once, not once a worker
        start_helpers()
    loader: DataLoader[Any] = DataLoader(
        _RequestDataset(images, transforms),
        sampler=requested,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=has_streams(device),
        multiprocessing_context=context,
        worker_init_fn=init_loader_worker,
    )

    # Nothing here may be part of a reference cycle: to collect one that holds workers takes 5 s for each of them.
    def through_workers(requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        requested.requests = requests
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # torch's own words beside the error
                answers = iter(loader)  # starts the workers, at first
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"{images.name} can't be handed to worker processes: {error}",
                "Define its class and functions at the top of a module, open files in __getitem__, or use --workers 0.",
            ) from error
        for answer in answers:
            if isinstance(answer, UserError):
                try:
                    raise answer
                finally:
                    del answer  # else the error would hold the frame that holds it
            pixels, classes, ids = (tensor.to(device, non_blocking=True) for tensor in answer)
            yield pixels, classes, ids

    return through_workers


class _RequestSampler(Sampler[Request]):
    """What the loader is asked for next; read in this process, in order."""

    requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class _RequestDataset(Dataset[tuple[Tensor, Tensor, Tensor] | UserError]):
    """An image set that answers a request in a worker process."""

    def __init__(self, images: ImageSet, transforms: "Transforms | None") -> None:
        self.images, self.transforms = images, transforms

    @cached_property
    def answer(self) -> Callable[[np.ndarray, int | None], tuple[Tensor, Tensor]]:
        """Made where it is used: a function inside a function can't be sent to a worker."""
        return answerer(self.images, self.transforms)

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor, Tensor] | UserError:
        numbers, epoch = request
        try:
            return *self.answer(numbers, epoch), torch.from_numpy(numbers)
        except UserError as error:  # handed over and raised there: a loader would wrap it in the worker's traceback
            return error


def reader(
    images: ImageSet,
    device: torch.device,
    loader: str = "auto",
    workers: int = 0,
    transforms: "Transforms | None" = None,
) -> Read:
    """The way to a set's samples: resident where it is an array that fits the device, else streaming.

    Transforms beside an accelerator are the workers': in this process they would keep it waiting.

    Raises:
        UserError: for `loader="resident"` with a set that is no array.
    """
    if loader == "resident" and not isinstance(images, ArraySet):
        raise UserError(
            f"--loader resident: the images of {images.name} are no array of one shape",
            "Use --loader streaming with --workers.",
        )
    apart = transforms is not None and device.type != "cpu"
    here = loader == "resident" or (loader == "auto" and not apart)
    if isinstance(images, ArraySet) and here and (loader == "resident" or _fits(images, device)):
        return resident(images, device, transforms)
    return streaming(images, device, workers, transforms)


def _fits(images: ArraySet, device: torch.device) -> bool:
    if device.type == "cpu":
        return True  # nothing is copied
    return images.nbytes < free_bytes(device) // 2
