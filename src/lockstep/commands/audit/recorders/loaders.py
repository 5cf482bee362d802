"""Who read which samples: data loaders, their passes and batches. Indices come from samplers, in the main process."""

import collections
import hashlib
import itertools
import weakref
from typing import Any

import torch
from torch.utils.data import Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from lockstep.commands.audit.events import around, emit, silence
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.small import LENGTHS

_numbers = itertools.count()
passes_begun = [0]  # in this process
_DIGESTED = 4096  # values of a data set's arrays that tell it from another one


def install(_plan: Plan) -> None:
    """Record loaders when they are first iterated."""
    state = _Loaders()
    around(_BaseDataLoaderIter, "__init__", state.begin)
    around(_BaseDataLoaderIter, "_next_index", state.next_index)
    around(_BaseDataLoaderIter, "__next__", state.next_batch)
    around(_MultiProcessingDataLoaderIter, "_reset", state.reset)


class _Pass:
    """One iteration over a loader: the indices that were asked for and not yet handed out."""

    def __init__(self, loader: int, number: int, of: Any) -> None:
        self.loader, self.number, self.of = loader, number, of
        self.asked: collections.deque[Any] = collections.deque()
        self.batches = 0
        self.last, self.ascending = -1, True  # of the indices into the loader's own set

    def named(self) -> dict[str, Any]:
        """Its fields in an event."""
        return {"loader": self.loader, "pass": self.number}

    def note(self, indices: Any) -> None:
        """Remember what was asked for, and whether the order is that of the set."""
        self.asked.append(indices)
        for each in indices if isinstance(indices, list | tuple) else [indices]:
            if isinstance(each, int):
                self.ascending = self.ascending and each > self.last
                self.last = each


class _Loaders:
    def __init__(self) -> None:
        self.known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self.counts: collections.Counter[int] = collections.Counter()

    def begin(self, original: Any, iterator: Any, loader: Any, *args: Any) -> None:
        self._start(iterator, loader)
        original(iterator, loader, *args)

    def reset(self, original: Any, iterator: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:  # workers that live on begin another pass
            self._start(iterator, loader)
        original(iterator, loader, first_iter)

    def _start(self, iterator: Any, loader: Any) -> None:
        if loader not in self.known:
            self.known[loader] = next(_numbers)
            with silence():
                facts = _described(loader)
            emit("loader", **facts, loader=self.known[loader])
        number = self.known[loader]
        self.passes[iterator] = _Pass(number, self.counts[number], weakref.ref(loader.dataset))
        emit("pass", loader=number, number=self.counts[number], epoch=_epoch(loader))
        passes_begun[0] += 1
        self.counts[number] += 1

    def next_index(self, original: Any, iterator: Any) -> Any:
        indices = original(iterator)
        if iterator in self.passes:
            self.passes[iterator].note(indices)
        return indices

    def next_batch(self, original: Any, iterator: Any) -> Any:
        found = self.passes.get(iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            if found is not None:
                emit("pass-end", **found.named(), ascending=found.ascending)
            raise
        if found is not None:
            asked = found.asked.popleft() if found.asked else None
            ids = _base_ids(found.of(), asked)
            emit("batch", **found.named(), number=found.batches, size=_size(batch), ids=ids)
            found.batches += 1
        return batch


def _described(loader: Any) -> dict[str, Any]:
    batch_sampler = loader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", loader.sampler)
    while hasattr(sampler, "sampler") and not hasattr(sampler, "num_replicas"):
        sampler = sampler.sampler  # wrapped by a library
    read, sampled = loader.dataset, getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    base = base_of(read)
    return {
        "dataset": digest_of(base),
        "kind": type(base).__name__,
        "full": _length(base),
        "unshortened": unshortened(read),
        "length": _length(read),
        "train": getattr(base, "train", None),
        "batch_size": getattr(loader, "batch_size", None) or getattr(batch_sampler, "batch_size", None),
        "batch_sampler": type(batch_sampler).__name__,
        "replicas": getattr(sampler, "num_replicas", None),
        "sampled": _length(sampled),
        "aligned": None if sampled is None else _length(sampled) == _length(read),
    }


def _epoch(loader: Any) -> int | None:
    """The epoch of a loader's sampler, by set_epoch or by itself."""
    for each in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        epoch = getattr(each, "epoch", None)
        if isinstance(epoch, int):
            return epoch
    return None


def unshortened(dataset: Any) -> int | None:
    """A set's length before small.py shortened it; None where it is a part of a shortened set."""
    length = _length(dataset)
    known = getattr(dataset, "__dict__", {}).get(LENGTHS)
    if known is not None:
        return int(known[0])
    return (
        None if isinstance(dataset, Subset) and unshortened(base_of(dataset)) != _length(base_of(dataset)) else length
    )


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:
        return None


def base_of(dataset: Any) -> Any:
    """The set behind subsets of it."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def digest_of(dataset: Any) -> str:
    """What tells a set from another one in every process: its class, length and first values."""
    hashed = hashlib.sha256(f"{type(dataset).__name__} {_length(dataset)} {getattr(dataset, 'train', None)}".encode())
    for name in ("data", "targets", "samples", "imgs", "tensors", "labels"):
        value = getattr(dataset, name, None)
        for part in value if isinstance(value, tuple) else [value]:
            if isinstance(part, torch.Tensor):
                part = part.detach().reshape(-1)[:_DIGESTED].cpu().tolist()
            elif part is not None and hasattr(part, "reshape"):
                part = part.reshape(-1)[:_DIGESTED].tolist()
            hashed.update(repr(part[:_DIGESTED] if isinstance(part, list) else None).encode())
    return hashed.hexdigest()[:12]


def _base_ids(dataset: Any, asked: Any) -> list[int] | None:
    """Indices of a batch, or of one sample, as those of the base set."""
    if asked is None or (isinstance(asked, list) and None in asked):
        return None
    ids = asked if isinstance(asked, list | tuple) else [asked]
    try:
        while isinstance(dataset, Subset):
            ids = [dataset.indices[i] for i in ids]
            dataset = dataset.dataset
        return [int(i) for i in ids]
    except (TypeError, ValueError, IndexError):
        return None


def _size(batch: Any) -> int | None:
    """The samples of a batch: the first dimension of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((size for each in batch if (size := _size(each)) is not None), None)
    return None
