"""Who reads which samples, in which order: torch's DataLoader, watched, and its epochs cut short."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

_LATER = 2  # samples of the one batch that is read of the third epoch and those after it; of an evaluation
_PLAIN_SAMPLERS = ("RandomSampler", "SequentialSampler", "DistributedSampler")


class Enough(BaseException):
    """The script is ended here, on purpose; nothing of its own should catch it."""


@dataclass
class Watched:
    """A loader of the script's."""

    loader: Any
    trains: bool = False
    passes: int = 0  # begun
    batches: int = 0  # of this pass
    steps: int = 0  # of the optimizer, in this pass
    rates: list[list[float]] = field(default_factory=list)  # at the beginning of each pass
    firsts: list[list[int]] = field(default_factory=list)  # ids of the first batch of the first two passes


@dataclass
class Loaders:
    """All loaders, and the batch that was delivered last."""

    steps: int  # of the optimizer to record
    deadline: float  # by time.monotonic()
    watched: dict[int, Watched] = field(default_factory=dict)
    last: tuple[Watched, list[int], Any] | None = None  # the loader, its ids, the batch
    rates: Any = lambda: []  # the optimizer's, now

    def of(self, loader: Any) -> Watched:
        """The record of a loader."""
        return self.watched.setdefault(id(loader), Watched(loader))

    def trained(self) -> None:
        """The batch that was delivered last has been learned from."""
        if self.last is not None:
            self.last[0].trains = True

    def stepped(self) -> None:
        """The optimizer took a step."""
        if self.last is not None:
            self.last[0].steps += 1

    def over(self, seen: Watched) -> bool:
        """Whether enough of this pass was read: of the first all steps to compare, of the second one, then a batch."""
        if not seen.batches:
            return False
        if not seen.trains:
            return bool(self.trains()) or seen.batches >= self.steps
        if seen.passes > 2:
            return True
        return seen.steps >= (self.steps if seen.passes == 1 else 1)

    def trains(self) -> list[Watched]:
        """The loaders that are learned from."""
        return [seen for seen in self.watched.values() if seen.trains]

    def install(self) -> None:
        """Watch the loaders that are made from here on."""
        _watch_passes(self)
        _watch_batches(self)


def _watch_passes(loaders: Loaders) -> None:
    begin: Any = DataLoader.__iter__
    reset: Any = _BaseDataLoaderIter._reset

    def __iter__(self: Any) -> Any:
        seen = loaders.of(self)
        seen.passes, seen.batches, seen.steps = seen.passes + 1, 0, 0
        return begin(self)

    def _reset(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_lockstep"] = loader, deque()
        reset(self, loader, *args, **kwargs)

    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]
    _BaseDataLoaderIter._reset = _reset  # type: ignore[method-assign]


def _watch_batches(loaders: Loaders) -> None:
    kind: Any = _BaseDataLoaderIter
    index, following, made = kind._next_index, kind.__next__, kind.__init__

    def __init__(self: Any, loader: Any) -> None:
        self.__dict__["_lockstep"] = loader, deque()
        made(self, loader)

    def _next_index(self: Any) -> Any:
        found = index(self)
        loader, planned = self.__dict__["_lockstep"]
        seen = loaders.of(loader)
        if isinstance(found, list):
            short = seen.passes > 2 if seen.trains else bool(loaders.trains())
            found = found[:_LATER] if short else found
            planned.append([int(each) for each in found])
        return found

    def __next__(self: Any) -> Any:
        loader, planned = self.__dict__["_lockstep"]
        seen = loaders.of(loader)
        if time.monotonic() > loaders.deadline:
            raise Enough("its time is over")
        if loaders.over(seen):
            raise StopIteration
        batch = following(self)
        ids = planned.popleft() if planned else []
        if not seen.batches:
            seen.rates.append(loaders.rates())
            if len(seen.firsts) < 2:
                seen.firsts.append(ids)
        seen.batches += 1
        loaders.last = seen, ids, batch
        return batch

    _BaseDataLoaderIter.__init__ = __init__  # type: ignore[method-assign]
    _BaseDataLoaderIter._next_index = _next_index  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]


def described(seen: Watched) -> dict[str, Any]:
    """What a loader is, as JSON."""
    loader = seen.loader
    sampler = getattr(loader, "sampler", None)
    kind = type(sampler).__name__
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0) or 0
    known = kind in _PLAIN_SAMPLERS or isinstance(sampler, torch.utils.data.DistributedSampler)
    return {
        "trains": seen.trains,
        "passes": seen.passes,
        "length": len(loader.dataset),
        "sampled": len(sampler) if hasattr(sampler, "__len__") else None,  # type: ignore[arg-type]
        "sampler": kind,
        "known_sampler": known,
        "batch_size": batch_size,
        "drop_last": bool(loader.drop_last),
        "rates": seen.rates,
        "firsts": seen.firsts,
    }
