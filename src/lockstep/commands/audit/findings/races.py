"""Findings about what ranks do at one time, with nothing that lets one of them wait for another."""

import itertools
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import Finding
from lockstep.commands.audit.records import Record, of

# what may make a rank wait for the others: more than does, so that what is left is certain
_MEETING = {"collective", "group", "wrap", "forward", "backward", "step"}


def _met(events: list[Event], until: Event) -> list[str]:
    """The meetings before an event, in order: two ranks' events after the same ones are not ordered."""
    before = itertools.takewhile(lambda each: each is not until, events)
    return [str(each.get("op", each["event"])) for each in before if each["event"] in _MEETING]


def handed_over(records: list[Record]) -> Iterator[Finding]:
    """LS406: a rank loads what another one saves, and nothing says that it waits."""
    for record in records:
        for writer, path, saved in _written(record):
            meetings = _met(record.ranks[writer], saved)
            for rank, events in record.ranks.items():
                reads = [each for each in of(events, "loaded") if each["path"] == path and rank != writer]
                raced = next((each for each in reads if _met(events, each) == meetings), None)
                if raced is not None:
                    says = (
                        f"rank {writer} saves {path} ({saved['at']}) and rank {rank} loads it with no collective in "
                        f"between{_lost(events)}"
                    )
                    yield Finding("LS406", raced["at"], says, record.nproc)
                    break


def _written(record: Record) -> Iterator[tuple[int, str, Event]]:
    """The files that one rank alone saves: (rank, path, the event), each time."""
    writers: dict[str, set[int]] = {}
    for rank, events in record.ranks.items():
        for each in of(events, "saved"):
            writers.setdefault(each["path"], set()).add(rank)
    for path, ranks in writers.items():
        rank = min(ranks)
        if path and len(ranks) == 1:
            yield from ((rank, path, each) for each in of(record.ranks[rank], "saved") if each["path"] == path)


def _lost(events: list[Event]) -> str:
    end = of(events, "end")
    error = str(end[-1].get("error", "")) if end else ""
    return f": it failed here with {error.partition(':')[0]}" if "No such file" in error or "EOF" in error else ""


def downloads(records: list[Record]) -> Iterator[Finding]:
    """LS108: ranks download the same files at one time."""
    for record in records:
        asked = [(rank, each) for rank, events in record.ranks.items() for each in of(events, "download")]
        for (rank, one), (other, two) in itertools.combinations(asked, 2):
            same = (one["kind"], one["root"]) == (two["kind"], two["root"]) and rank != other and record.joined
            if same and _met(record.ranks[rank], one) == _met(record.ranks[other], two):
                says = f"ranks {rank} and {other} download {one['kind']} to {one['root']} at one time"
                yield Finding("LS108", one["at"], says, record.nproc)
                break
