"""Findings about collectives and waits: who never calls one, and what each step waits for."""

import itertools
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Record, of, trainings

_MOST = 0.9  # of the steps: "each"


def missing(records: list[Record]) -> Iterator[Finding]:
    """LS308: the ranks' collectives are not the same, and some wait for ever, or failed."""
    for record in records:
        if record.ended == "done" or record.world < 2 or len(record.ranks) < 2:
            continue
        lists = {rank: _joint(events) for rank, events in record.ranks.items()}
        longest = max(lists, key=lambda rank: len(lists[rank]))
        for place, here in enumerate(lists[longest]):
            others = [rank for rank, calls in lists.items() if place >= len(calls) or calls[place][0] != here[0]]
            if others:
                rank = others[-1]
                number = sum(1 for call in lists[longest][: place + 1] if call[0] == here[0])
                says = f"rank {rank} never calls the {_th(number)} {here[0]}, which rank {longest} calls at {here[1]}"
                if place < len(lists[rank]):
                    says += f": it calls {lists[rank][place][0]} at {lists[rank][place][1]} instead"
                else:
                    says += f": {_last(record.ranks[rank])}"
                yield Finding("LS308", here[1], says, record.nproc)
                break


def _joint(events: list[Event]) -> list[tuple[str, str]]:
    """What all ranks have to do alike, in order: (what, where)."""
    wrapped = any(each["wrapped"] == "DistributedDataParallel" for each in of(events, "forward"))
    found = list[tuple[str, str]]()
    for each in of(events, "collective", "backward"):
        if each["event"] == "collective":
            found.append((each["op"], each["at"]))
        elif wrapped and each["sync"]:
            found.append(("backward pass with DDP's all-reduce", each["at"]))
    return found


def _last(events: list[Event]) -> str:
    end = next(iter(of(events, "end")), None)
    if end is not None:
        return "it has ended" if end["how"] != "error" else f"it failed at {end['at']}: {end['error']}"
    last = next((each for each in reversed(events) if each["at"] and each["event"] != "waiting"), None)
    return f"it was last seen at {last['at']}" if last else "nothing was seen of it"


def _th(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def each_step(records: list[Record]) -> Iterator[Finding]:
    """LS309: a barrier in each step. LS310: each step reads a value back."""
    for record in records:
        for reading in trainings(record.first):
            steps = len(of(reading.events, "step"))
            if steps < 3:
                continue
            barriers = [each for each in of(reading.events, "collective") if "barrier" in each["op"]]
            if len(barriers) >= _MOST * steps and record.world > 1:
                says = f"{times(len(barriers), 'barrier')} in {times(steps, 'step')}"
                yield Finding("LS309", barriers[0]["at"], says, record.nproc)
            lines: dict[str, list[Event]] = {}
            for each in of(reading.events, "sync"):
                lines.setdefault(each["at"], []).append(each)
            for at, found in lines.items():
                if len(found) >= _MOST * len(reading.batches):
                    kinds = " and ".join(sorted({each["kind"] for each in found}))
                    says = (
                        f"{times(len(found), 'time')} in {times(steps, 'step')} the host waits for the device: {kinds}"
                    )
                    yield Finding("LS310", at, says, record.nproc)


def accumulated(records: list[Record]) -> Iterator[Finding]:
    """LS311: accumulated passes all all-reduce. LS312: no_sync leaves out the forward pass."""
    for record in records:
        if record.world < 2:
            continue
        for reading in trainings(record.first)[:1]:
            done = of(reading.events, "forward", "backward", "step")
            backwards, steps = of(done, "backward"), len(of(done, "step"))
            wrapped = any(each["wrapped"] for each in of(done, "forward"))
            if not wrapped or not steps:
                continue
            if len(backwards) >= 2 * steps and all(each["sync"] for each in backwards) and len(backwards) > 2:
                says = f"{times(len(backwards), 'pass', 'passes')} all-reduced gradients for {times(steps, 'step')}"
                yield Finding("LS311", backwards[0]["at"], says, record.nproc)
            late = [
                after
                for before, after in itertools.pairwise(done)
                if (before["event"], after["event"]) == ("forward", "backward")
                and before["wrapped"]
                and before["sync"]
                and not after["sync"]
            ]
            if late:
                says = (
                    f"{len(late)} of {len(backwards)} backward passes stand in no_sync and their forward passes don't"
                )
                yield Finding("LS312", late[0]["at"], says, record.nproc)
