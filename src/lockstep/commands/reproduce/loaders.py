"""Who reads which samples, in which order: torch's DataLoader, watched, and its epochs cut short."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.commands.audit.events import around

_LATER = 2  # samples of the one batch that is read of the third epoch and those after it; of an evaluation


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
        """Watch the loaders of this process."""
        around(DataLoader, "__iter__", self._begin)
        for name in ("__init__", "_reset"):
            around(_BaseDataLoaderIter, name, self._plan)
        around(_BaseDataLoaderIter, "_next_index", self._next_index)
        around(_BaseDataLoaderIter, "__next__", self._next)

    def _begin(self, original: Any, loader: Any) -> Any:
        seen = self.of(loader)
        seen.passes, seen.batches, seen.steps = seen.passes + 1, 0, 0
        return original(loader)

    def _plan(self, original: Any, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        iterator.__dict__["_lockstep"] = loader, deque()
        original(iterator, loader, *args, **kwargs)

    def _next_index(self, original: Any, iterator: Any) -> Any:
        found = original(iterator)
        loader, planned = iterator.__dict__["_lockstep"]
        seen = self.of(loader)
        if isinstance(found, list):
            short = seen.passes > 2 if seen.trains else bool(self.trains())
            found = found[:_LATER] if short else found
            planned.append([int(each) for each in found])
        return found

    def _next(self, original: Any, iterator: Any) -> Any:
        loader, planned = iterator.__dict__["_lockstep"]
        seen = self.of(loader)
        if time.monotonic() > self.deadline:
            raise Enough("its time is over")
        if self.over(seen):
            raise StopIteration
        batch = original(iterator)
        ids = planned.popleft() if planned else []
        if not seen.batches:
            seen.rates.append(self.rates())
            if len(seen.firsts) < 2:
                seen.firsts.append(ids)
        seen.batches += 1
        self.last = seen, ids, batch
        return batch


def described(seen: Watched) -> dict[str, Any]:
    """What a loader is, as JSON."""
    loader = seen.loader
    sampler = getattr(loader, "sampler", None)
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0) or 0
    return {
        "trains": seen.trains,
        "passes": seen.passes,
        "length": len(loader.dataset),
        "sampled": len(sampler) if hasattr(sampler, "__len__") else None,  # type: ignore[arg-type]
        "sampler": type(sampler).__name__,
        "shuffles": getattr(sampler, "shuffle", True),
        "batch_size": batch_size,
        "drop_last": bool(loader.drop_last),
        "rates": seen.rates,
        "firsts": seen.firsts,
    }
