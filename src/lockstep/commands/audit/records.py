"""What one start of the script leaves: the events of each rank, how it ended, passes over data."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.commands.audit.events import Event, gather
from lockstep.commands.audit.waiting import stacks


@dataclass(frozen=True)
class Reading:
    """One pass over a loader: the batches that the script took of it, and whether it trained meanwhile."""

    loader: Event
    number: int
    at: str
    batches: tuple[Event, ...]
    whole: bool
    events: tuple[Event, ...]  # all of this process's meanwhile
    order: bool | None = None  # whether indices into the loader's own set came ascending; None: not known

    @property
    def trains(self) -> bool:
        """Whether the model was trained by it."""
        return any(each["event"] in ("backward", "step") for each in self.events)

    @property
    def epoch(self) -> int | None:
        """The epoch of its sampler; None where it has none."""
        return next((each.get("epoch") for each in self.events if each["event"] == "pass"), None)

    @property
    def ascending(self) -> bool:
        """Whether the samples came in their set's own order."""
        return self.ids == sorted(self.ids) if self.order is None else self.order

    @property
    def ids(self) -> list[int]:
        """The indices of all batches, in order; none for sets without indices."""
        return [each for batch in self.batches for each in batch["ids"] or ()]

    @property
    def samples(self) -> int:
        """How many samples were read."""
        return sum(batch["size"] or len(batch["ids"] or ()) for batch in self.batches)


@dataclass(frozen=True)
class Record:
    """One start: `nproc` as asked, and the events by rank. `others` are processes that were no rank, by pid."""

    nproc: int
    ranks: dict[int, list[Event]]
    others: dict[int, list[Event]] = field(default_factory=dict)
    codes: tuple[int, ...] = ()
    ended: str = "done"
    left: tuple[str, ...] = ()  # of the script's folder: what was not copied, in words
    printed: tuple[str, ...] = ()
    seconds: float = 0.0
    purpose: str = ""  # "": the usual; "stopped" after an epoch, "resumed" from that, "bare": no local rank as argument

    @property
    def world(self) -> int:
        """The processes of the group, or 1 where there is none."""
        return max((each["world"] for events in self.ranks.values() for each in of(events, "group")), default=1)

    @property
    def nodes(self) -> int:
        """The machines that were pretended."""
        return len({self.node(rank) for rank in self.ranks}) or 1

    def node(self, rank: int) -> int:
        """The machine of a rank."""
        return int(next((each.get("node") or 0 for each in of(self.ranks[rank], "process")), 0))

    @property
    def first(self) -> list[Event]:
        """The events of the lowest rank."""
        return self.ranks[min(self.ranks)] if self.ranks else []

    @property
    def joined(self) -> bool:
        """Whether the processes joined a group."""
        return any(of(events, "group") for events in self.ranks.values())


def load(folder: Path, nproc: int, home: str = "", **values: Any) -> Record:
    """The record of the events in a folder, and of where in `home` its processes waited at the end."""
    processes = gather(folder)
    for pid, stack in stacks(folder, home).items():
        if pid in processes:
            at = next(iter(stack["stack"]), "")
            processes[pid].append({"event": "waiting", "pid": pid, "at": at} | stack)
    ranks, others = dict[int, list[Event]](), dict[int, list[Event]]()
    for pid, events in processes.items():
        rank = next((each["rank"] for each in reversed(of(events, "group"))), None)
        first = of(events, "process")
        if rank is None and first:
            rank = first[0].get("rank")
        if rank is None or rank in ranks:
            others[pid] = events
        else:
            ranks[rank] = events
    if not ranks and len(others) == 1:  # a script of one process that asks for no rank
        ranks = {0: next(iter(others.values()))}
        others = {}
    return Record(nproc, dict(sorted(ranks.items())), others, **values)


def of(events: Iterable[Event], *kinds: str) -> list[Event]:
    """The events of these kinds."""
    return [each for each in events if each["event"] in kinds]


def readings(events: list[Event]) -> Iterator[Reading]:
    """The passes over loaders, in the order in which they began; nested ones differ in their loaders."""
    loaders = {each["loader"]: each for each in of(events, "loader")}
    begun = [(place, each) for place, each in enumerate(events) if each["event"] == "pass"]
    for place, start in begun:
        key = start["loader"], start["number"]
        own = [
            (i, each)
            for i, each in enumerate(events[place:], place)
            if each["event"] in ("batch", "pass-end") and (each["loader"], each["pass"]) == key
        ]
        batches = tuple(each for _, each in own if each["event"] == "batch")
        last = own[-1][0] if own else place
        if own and (own[-1][1]["event"] == "batch" or len(of(events[place:last], "forward")) < len(batches)):
            # left before its end, or fetched a batch ahead, as Accelerate does: what follows belongs to its last batch
            following = (i for i, each in enumerate(events[last + 1 :], last + 1) if each["event"] == "pass")
            last = next(following, len(events))
        whole = bool(own) and own[-1][1]["event"] == "pass-end"
        ends = [each.get("ascending") for _, each in own if each["event"] == "pass-end"]
        yield Reading(
            loaders.get(start["loader"], {}),
            start["number"],
            start["at"],
            batches,
            whole,
            tuple(events[place:last]),
            ends[-1] if ends else None,
        )


def trainings(events: list[Event]) -> list[Reading]:
    """The passes in which the model was trained."""
    return [each for each in readings(events) if each.trains]


def evaluations(events: list[Event]) -> list[Reading]:
    """The passes in which it was not, and was called."""
    return [each for each in readings(events) if not each.trains and each.batches and of(each.events, "forward")]
