"""What a script met that is not as in life: small data, stand-ins, a pretended GPU, a scratch copy, no network."""

from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import times
from lockstep.commands.audit.records import Record

_NAMED = 8  # files and calls that are named of each kind


def lines(records: list[Record]) -> list[str]:
    """A line for each thing, once for all N."""
    return list(dict.fromkeys(line for record in records for line in _lines(record)))


def _lines(record: Record) -> Iterator[str]:
    every = [(rank, each) for rank, events in record.ranks.items() for each in events]
    every += [(-1, each) for events in record.others.values() for each in events]
    yield from record.left
    for kind, told in (("small", _small), ("stand-in", _stand_in), ("cut", _cut)):
        yield from dict.fromkeys(told(each) for _, each in every if each["event"] == kind)
    network = dict.fromkeys(f"{each['what']} ({each['at']})" for _, each in every if each["event"] == "network")
    yield from _list("network, refused: ", list(network))
    files: dict[tuple[str, str], list[int]] = {}
    for rank, each in every:
        if each["event"] == "file":
            where = "refused, was there before" if each["refused"] else "outside the copy" if each["elsewhere"] else ""
            verb = "deleted" if each["mode"] == "delete" else "written"
            ranks = files.setdefault((verb if not where else f"{verb}, {where}", each["path"]), [])
            if rank not in ranks:
                ranks.append(rank)
    for verb in dict.fromkeys(verb for verb, _ in files):
        yield from _list(f"{verb}: ", [f"{path}{_by(ranks)}" for (each, path), ranks in files.items() if each == verb])


def _small(event: Event) -> str:
    return f"small data: {event['length']:,} of {times(event['full'], 'sample')} ({event['kind']}{_part(event)})"


def _stand_in(event: Event) -> str:
    return f"stand-in for {event['kind']}{_part(event)}: {event['why']}"


def _part(event: Event) -> str:
    train = event.get("train")
    return "" if train is None else ", training" if train else ", test"


def _cut(event: Event) -> str:
    return f"ended at {event['at']}: enough {event['why']}"


def _by(ranks: list[int]) -> str:
    known = [str(rank) for rank in ranks if rank >= 0]
    return f" (rank{'s' if len(known) > 1 else ''} {', '.join(known)})" if known else ""


def _list(head: str, things: list[str]) -> Iterator[str]:
    if things:
        more = f" and {len(things) - _NAMED} more" if len(things) > _NAMED else ""
        yield head + ", ".join(things[:_NAMED]) + more
