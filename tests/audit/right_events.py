"""Records of a right training on N processes, as recorders would leave them, made without torch or processes."""

from typing import Any

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.records import Record

SAMPLES, TESTED, BATCH, EPOCHS = 48, 10, 8, 2


def event(what: str, at: str = "", /, **values: Any) -> Event:
    return {"event": what, "pid": 100, "t": 0.0, "at": at} | values


def order(epoch: int) -> list[int]:
    """A shuffled order of the samples, another one in each epoch."""
    return sorted(range(SAMPLES), key=lambda sample: (sample * 7919 + 31 * epoch) % 101)


def loader(number: int, dataset: str, length: int, batch: int, world: int, rank: int) -> Event:
    held = {"dataset": dataset, "kind": "Pictures", "full": length, "length": length, "train": None}
    cut = {"batches": -(-length // world // batch), "batch_size": batch, "drop_last": False, "workers": 0}
    drawn = {"sampler": "DistributedSampler", "replicas": world, "sampler_rank": rank, "sampled": length}
    return event("loader", "train.py:20", loader=number, aligned=True, **held, **cut, **drawn)


def forward(training: bool, wrapped: bool, size: int) -> Event:
    told = {"model": "Net", "training": training, "grad": training, "size": size, "sync": True, "modal": True}
    kind = "DistributedDataParallel" if wrapped else ""
    return event("forward", "train.py:22", wrapped=kind, devices=["cuda:0"], **told)


def step(number: int, rate: float = 0.1) -> Event:
    weights = {"conv.weight": [1.0 - number / 10, 4.0], "bn1.weight": [2.0, 3.0 + number / 10]}
    told = {"lr": [rate], "grads": {"conv.weight": [0.1, 1.0], "bn1.weight": [0.2, 1.0]}, "weights": weights}
    return event("step", "train.py:26", optimizer=0, number=number, digest=f"{number:016x}", **told)


def rank_of(world: int, rank: int) -> list[Event]:
    """One rank's events: two epochs of training, and an evaluation of all ranks' parts after each."""
    batch, number = BATCH // world, 0
    events = [event("process", parent=1, rank=rank, world=world)]
    told = {"backend": "nccl", "init_method": None, "port": "40000", "own_port": False}
    events.append(event("group", "train.py:9", rank=rank, world=world, **told))
    norms = {"batch_norms": 0, "sync_batch_norms": 1}
    events.append(event("wrap", "train.py:15", kind="ddp", find_unused=False, devices=["cuda:0"], **norms))
    events += [loader(0, "train", SAMPLES, batch, world, rank), loader(1, "test", TESTED, 5, world, rank)]
    for epoch in range(EPOCHS):
        own = order(epoch)[rank::world]
        events.append(event("pass", "train.py:20", loader=0, number=epoch))
        for place, begin in enumerate(range(0, len(own), batch)):
            ids = own[begin : begin + batch]
            events.append(event("batch", "train.py:20", **_batch(0, epoch, place, ids)))
            events += [forward(True, True, len(ids)), event("zero", "train.py:23", optimizer=0)]
            events += [event("backward", "train.py:25", scale=1.0, loss=1.0, sync=True), step(number)]
            number += 1
        events.append(event("pass-end", "train.py:20", **{"loader": 0, "pass": epoch, "batches": place + 1}))
        own = list(range(TESTED))[rank::world]
        events.append(event("pass", "train.py:30", loader=1, number=epoch))
        events.append(event("batch", "train.py:30", **_batch(1, epoch, 0, own)))
        events.append(forward(False, False, len(own)))
        events.append(event("pass-end", "train.py:30", **{"loader": 1, "pass": epoch, "batches": 1}))
        events.append(event("collective", "train.py:33", op="all_reduce", number=epoch, shape=[2], group=world))
        if rank == 0:
            path = {"path": "last.pt", "kind": "weights", "keys": [], "module": False}
            events.append(event("saved", "train.py:36", **path))
    return [*events, event("group-end", "train.py:40"), event("end", how="done")]


def _batch(number: int, epoch: int, place: int, ids: list[int]) -> dict[str, Any]:
    return {"loader": number, "pass": epoch, "number": place, "size": len(ids), "ids": ids}


def record(world: int) -> Record:
    """A right training on so many processes."""
    ranks = {rank: rank_of(world, rank) for rank in range(world)}
    return Record(world, ranks, codes=(0,) * world, printed=("",) * world)
