"""An audit's result as text or JSON."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.faults import FAULTS, Finding, times
from lockstep.commands.audit.findings.ranks import where_ranks_wait
from lockstep.commands.audit.records import Record, evaluations, of, trainings


def text(script: Path, records: list[Record], found: list[Finding]) -> str:
    """What people read: a line for each N, the findings, and their count."""
    lines = [line for record in records for line in (_summary(record), *(f"    {each}" for each in _troubles(record)))]
    lines += surroundings(records)
    for each in found:
        lines += ["", *_paragraph(script, each)]
    count = sum(not each.note for each in found)
    return "\n".join([*lines, "", f"{count} finding{'' if count == 1 else 's'}"])


def _paragraph(script: Path, each: Finding) -> list[str]:
    fault = FAULTS[each.code]
    lines = [f"{each.at or script.name}: {'note' if each.note else each.code}: {fault.title}"]
    for head, words in (("seen:   ", each.says), ("result: ", fault.result)):
        if words:
            lines += textwrap.wrap(head + words, 116, initial_indent="    ", subsequent_indent="            ")
    heads = ["    mend:   ", *["            "] * fault.mend.count("\n")]
    return lines + [head + line for head, line in zip(heads, fault.mend.splitlines(), strict=False)]


def _troubles(record: Record) -> list[str]:
    """What each rank was doing when the processes were ended, or which of them failed, where and with what."""
    ends = {rank: end for rank, events in record.ranks.items() for end in of(events, "end") if end["how"] == "error"}
    return where_ranks_wait(record) or [
        f"rank {rank} failed at {end['at']}: {end['error'].splitlines()[0]}" for rank, end in ends.items()
    ]


def _summary(record: Record) -> str:
    events = record.first
    parts = [
        times(len(record.ranks), "rank"),
        times(len(trainings(events)), "training pass", "training passes"),
        times(len(of(events, "step")), "step"),
        times(len(evaluations(events)), "evaluation"),
        times(len(of(events, "collective")), "collective"),
    ]
    where = f" on {record.nodes} machines" if record.nodes > 1 else ""
    return f"N = {record.nproc}{where}: {', '.join(parts)}; {record.ended} in {record.seconds:.1f} s"


def as_json(script: Path, records: list[Record], found: list[Finding]) -> str:
    """What programs read."""
    names = ("nproc", "world", "ended", "codes", "seconds")
    runs = [{name: getattr(each, name) for name in names} | {"waiting": where_ranks_wait(each)} for each in records]
    facts = {"script": str(script), "surroundings": surroundings(records), "runs": runs}
    return json.dumps(facts | {"findings": [*map(asdict, found)]}, indent=2)


_NAMED = 8  # files and calls that are named of each kind


def surroundings(records: list[Record]) -> list[str]:
    """A line for each thing, once for all N."""
    return list(dict.fromkeys(line for record in records for line in _lines(record)))


def _lines(record: Record) -> Iterator[str]:
    every = [(rank, each) for rank, events in record.ranks.items() for each in events]
    every += [(-1, each) for events in record.others.values() for each in events]
    yield from record.left
    for kind, line in (("small", _small), ("stand-in", _stand_in), ("cut", _cut)):
        yield from dict.fromkeys(line(each) for _, each in every if each["event"] == kind)
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
