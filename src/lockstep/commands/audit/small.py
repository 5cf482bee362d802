"""Small data and few steps: each of the script's data sets keeps some samples, and training ends after some epochs."""

# ruff: noqa: B010  type checkers would not have torch's methods replaced

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, random_split

from lockstep.commands.audit import standins
from lockstep.commands.audit.events import emit
from lockstep.commands.audit.plan import Plan

_LARGE = 60_000  # samples of a set that keeps as many as the plan says; others keep somewhat fewer or more
_KEPT = 48  # what a set's length is modulo this, it stays: whether 2, 3, 4, ... ranks divide it evenly is not changed
_WITHOUT_LOADER = 4  # times the plan's steps end a training that reads no loader
LENGTHS = "_lockstep_lengths"
_FINISHED: set[type] = {Subset, ConcatDataset, IterableDataset}  # as long as the sets inside them


def install(plan: Plan) -> None:
    """Make every data set small, and end training in time."""
    _Small(plan.samples).install()
    _Cut(plan.epochs, plan.steps).install()
    standins.install(emit)


def kept(length: int, most: int) -> int:
    """How many of a set's samples are kept: all up to `most`; of 60,000 `most`, of others by a power of their length.

    So a training set stays larger than its test set, and a length keeps its remainder by 2, 3, 4, 6, 8, 12 and 16.
    """
    if length <= most:
        return length
    half = max(most // 2, 1)
    power = math.log(2) / math.log(max(_LARGE / half, 2))
    near = int(half * (length / half) ** power)
    below = near - (near - length) % _KEPT
    return min(length, below if below > _KEPT // 2 else below + _KEPT)


class _Small:
    """Classes of data sets whose length and items are those of the samples that are kept, spread over the set."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.inside: list[Any] = []  # sets whose method is running, the innermost last
        self.shrunk = False  # whether a set inside the running __len__ was shortened: the outer one is then as well

    def install(self) -> None:
        """Wrap the classes that are there, and those that will be defined."""
        standins.for_each_dataset(self.wrap)
        self.lengths_by_number()

    def wrap(self, cls: type) -> None:
        """Wrap what a class defines of its own."""
        if cls in _FINISHED or issubclass(cls, IterableDataset):
            return
        for name, wrapper in {"__len__": self.length, "__getitem__": self.item, "__getitems__": self.items}.items():
            if name in cls.__dict__:
                setattr(cls, name, wrapper(cls.__dict__[name]))

    @contextlib.contextmanager
    def running(self, dataset: Any) -> Iterator[None]:
        self.inside.append(dataset)
        try:
            yield
        finally:
            self.inside.pop()

    def length(self, original: Callable[..., int]) -> Callable[..., int]:
        @wraps(original)
        def length(dataset: Any) -> int:
            if any(each is dataset for each in self.inside):  # super().__len__()
                return original(dataset)
            before, self.shrunk = self.shrunk, False
            with self.running(dataset):
                full = original(dataset)
            small = full if self.shrunk else kept(full, self.most)
            self.shrunk = before or self.shrunk or small < full
            if not self.inside:
                self.shrunk = False
            if small < full and getattr(dataset, LENGTHS, None) != (full, small):
                train = getattr(dataset, "train", None)
                emit("small", kind=type(dataset).__name__, train=train, full=full, length=small)
            dataset.__dict__[LENGTHS] = (full, small)
            return small

        return length

    def item(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def item(dataset: Any, index: Any) -> Any:
            if any(each is dataset for each in self.inside):
                return original(dataset, index)
            with self.running(dataset):
                return original(dataset, _place(dataset, index))

        return item

    def items(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def items(dataset: Any, indices: Any) -> Any:
            with self.running(dataset):
                return original(dataset, [_place(dataset, index) for index in indices])

        return items

    def lengths_by_number(self) -> None:
        """Scripts write lengths as numbers: random_split(set, [50000, 10000]), Subset(set, range(50000))."""
        torch_subset, torch_split = Subset.__init__, random_split

        def subset(self: Any, dataset: Any, indices: Any) -> None:
            full, small = _lengths(dataset)
            if small < full and any(operator.index(each) >= small for each in indices):
                numbers: list[int] = [operator.index(each) * small // full for each in indices]
                indices = list(dict.fromkeys(numbers))
            torch_subset(self, dataset, indices)

        @wraps(torch_split)
        def split(dataset: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:
            full, small = _lengths(dataset)
            if small < full and sum(lengths) == full:
                ends = [sum(lengths[: place + 1]) * small // full for place in range(len(lengths))]
                lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
            return torch_split(dataset, lengths, *args, **kwargs)

        setattr(Subset, "__init__", wraps(torch_subset)(subset))
        for module in (torch.utils.data, torch.utils.data.dataset):
            setattr(module, "random_split", split)


def _lengths(dataset: Any) -> tuple[int, int]:
    """A set's full and small length."""
    small = len(dataset)
    return getattr(dataset, LENGTHS, (small, small))


def _place(dataset: Any, index: Any) -> Any:
    """The index in the full set of a small one's index."""
    full, small = getattr(dataset, LENGTHS, None) or (_lengths(dataset) if hasattr(dataset, "__len__") else (0, 0))
    try:
        number = operator.index(index)
    except TypeError:  # a name, a list, a slice
        return index
    if small == full:
        return index
    if not -small <= number < small:
        raise IndexError(f"index {number} of {small} samples")
    return (number % small) * full // small


class _Cut:
    """Ends the process where a training pass more than the plan's would begin; ranks come there alike."""

    def __init__(self, epochs: int, steps: int) -> None:
        self.epochs, self.steps = epochs, steps
        self.passes: dict[int, int] = {}  # of a data set: passes in which an optimizer took a step
        self.running: list[_Pass] = []
        self.bare = 0  # steps outside of all passes

    def install(self) -> None:
        """Watch loaders and optimizers."""
        torch_iter = DataLoader.__iter__
        cut = self

        @wraps(torch_iter)
        def begun(loader: Any) -> Iterator[Any]:
            return cut.passed(loader, torch_iter)

        setattr(DataLoader, "__iter__", begun)
        register_optimizer_step_pre_hook(lambda *_: self.check_bare())
        register_optimizer_step_post_hook(lambda *_: self.stepped())

    def passed(self, loader: Any, torch_iter: Any) -> Iterator[Any]:
        """A loader's pass, its first batch not asked for yet."""
        number = id(loader.dataset)  # scripts create a loader for each epoch
        if self.passes.get(number, 0) >= self.epochs:
            self.end("epochs")
        whole = not isinstance(loader.dataset, IterableDataset)
        return _Pass(self, number, torch_iter(loader), None if whole else self.steps)

    def stepped(self) -> None:
        """An optimizer took a step."""
        if not self.running:
            self.bare += 1
        elif not self.running[-1].trains:
            self.running[-1].trains = True
            number = self.running[-1].number
            self.passes[number] = self.passes.get(number, 0) + 1

    def check_bare(self) -> None:
        """End a loop that reads no loader."""
        if not self.running and self.bare >= _WITHOUT_LOADER * self.steps and not self.passes:
            self.end("steps")

    def end(self, why: str) -> None:
        """End the process as if the script had ended here."""
        emit("cut", why=why)
        raise SystemExit(0)


class _Pass:
    """A loader's iterator, and which one is running: the last that gave a batch."""

    def __init__(self, cut: _Cut, number: int, batches: Any, most: int | None) -> None:
        self.cut, self.number, self.batches, self.most, self.given = cut, number, batches, most, 0
        self.trains = False

    def __iter__(self) -> "_Pass":
        return self

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["batches"], name)

    def __next__(self) -> Any:
        self.cut.running = [each for each in self.cut.running if each is not self]
        if self.most is not None and self.given >= self.most:
            raise StopIteration
        batch = next(self.batches)
        self.given += 1
        self.cut.running.append(self)
        return batch
