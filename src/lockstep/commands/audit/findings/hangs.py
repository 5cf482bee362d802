"""Findings about ranks that wait for each other: where each of them is, and which call one of them never makes."""

import itertools
import re
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Record, of

_LOST = "closed by peer|reset by peer"  # what the other ranks' errors say when one is gone
_MIXED = re.compile(r"gloo::EnforceNotMet.*preamble\D*(\d+) vs (\d+)", re.DOTALL)  # a call met another one
_STARTING = ("init_process_group", "_create_c10d_store", "rendezvous")


def apart(records: list[Record]) -> Iterator[Finding]:
    """LS308: the ranks' collectives are not the same ones, in number, kind or shape."""
    for record in records:
        found = _apart(record)
        if found:
            yield found


def lines(record: Record) -> list[str]:
    """What each rank was doing when the processes were ended; empty where they ended by themselves."""
    if record.ended not in ("stalled", "deadline", "failed"):
        return []
    places = {rank: _place(events) for rank, events in record.ranks.items()}
    if not any(of(events, "waiting") for events in record.ranks.values()):
        return []
    return [f"rank {rank} {told}" for rank, told in places.items()]


def _apart(record: Record) -> Finding | None:
    """The first collective over all ranks that one of them doesn't call, or calls as another one."""
    if record.ended not in ("stalled", "deadline") and not _deserted(record) and not _mixed(record):
        return None
    calls = {rank: _collectives(events, record.world) for rank, events in record.ranks.items()}
    for place, row in enumerate(itertools.zip_longest(*calls.values())):
        called = {rank: each for rank, each in zip(calls, row, strict=True) if each}
        kinds = {each["op"] for each in called.values()}
        if len(kinds) > 1 or len(called) < len(calls):
            return _never(record, calls, called, place)
        shapes = {str(each["shape"]) for each in called.values() if each["op"] == "all_reduce"}
        if len(shapes) > 1:
            told = ", ".join(f"{each['shape']} on rank {rank}" for rank, each in called.items())
            first = next(iter(called.values()))
            return Finding(
                "LS308", first["at"], f"the {_nth(place)} collective, an all_reduce, is of {told}", record.nproc
            )
    return _backwards(record)


def _mixed(record: Record) -> str:
    """How many bytes of another call a rank got, for which gloo ended it; "" where none did."""
    met = next((found for text in record.printed if (found := _MIXED.search(text))), None)
    return f"; it got another call's data, {met[1]} bytes instead of {met[2]}, and was aborted" if met else ""


def _deserted(record: Record) -> bool:
    """Whether a rank came to its end while others were in a collective with it, and lost their peer."""
    ends = [end for events in record.ranks.values() for end in of(events, "end")]
    lost = any(re.search(_LOST, str(each.get("error"))) for each in ends)
    return lost and any(each["how"] == "done" for each in ends)


def _never(record: Record, calls: dict[int, list[Event]], called: dict[int, Event], place: int) -> Finding:
    """Ranks call different things at one place of their sequences: what most call, the others never do."""

    def number(op: str, rank: int) -> int:
        return sum(each["op"] == op for each in calls[rank][: place + 1])

    groups: dict[str, list[int]] = {}
    for rank, each in called.items():
        groups.setdefault(each["op"], []).append(rank)
    op = max(groups, key=lambda op: (len(groups[op]), number(op, groups[op][0])))
    others = [rank for rank in calls if rank not in groups[op]]
    first, waits = called[groups[op][0]], "waits" if len(groups[op]) == 1 else "wait"
    says = (
        f"{_ranks(others)} never {'calls' if len(others) == 1 else 'call'} the {_nth(number(op, groups[op][0]) - 1)} "
    )
    says += f"{op} ({first['at']}), in which {_ranks(groups[op])} {waits}{_mixed(record)}"
    for rank in others:
        says += f"; rank {rank} {_place(record.ranks[rank])}"
    return Finding("LS308", first["at"], says, record.nproc)


def _collectives(events: list[Event], world: int) -> list[Event]:
    """The collectives over all ranks; what a rank says by itself, and groups of some, are others."""
    return [each for each in of(events, "collective") if each["group"] == world]


def _backwards(record: Record) -> Finding | None:
    """DDP's own all-reduce isn't recorded: ranks that are in a pass which another one never begins."""
    for kind, calls in (("backward", "backward pass"), ("forward", "forward pass")):
        made = {rank: len(of(events, kind)) for rank, events in record.ranks.items()}
        inside = {rank: _waits_in(events) for rank, events in record.ranks.items()}
        most, least = max(made.values(), default=0), min(made.values(), default=0)
        held = [rank for rank in made if made[rank] == most and inside[rank] == kind]
        fewer = [rank for rank in made if made[rank] == least]
        if most > least and held:
            at = of(record.ranks[held[0]], "waiting")[0]["at"]
            says = f"{_ranks(held)} {'waits' if len(held) == 1 else 'wait'} in the {_nth(most - 1)} {calls}, which has "
            says += f"DDP's collectives; {_ranks(fewer)} made {times(least, calls).replace('passs', 'passes')}"
            return Finding("LS308", at, says, record.nproc)
    return None


def _waits_in(events: list[Event]) -> str:
    """What a rank's main thread was in: a collective's name, "backward", "forward", "init_process_group" or ""."""
    told = of(events, "waiting")
    inside = told[0]["inside"] if told else []
    last = of(events, "collective")
    if last and last[-1]["op"] in inside:
        return str(last[-1]["op"])
    if any(name in inside for name in _STARTING):
        return "init_process_group"
    if "backward" in inside or "_engine_run_backward" in inside:
        return "backward"
    return "forward" if {"_pre_forward", "_sync_buffers", "_run_ddp_forward"} & set(inside) else ""


def _place(events: list[Event]) -> str:
    """Where a rank is, in words."""
    told = of(events, "waiting")
    if not told:
        end = of(events, "end")
        if end and re.search(_LOST, str(end[-1].get("error"))):
            return f"was at {end[-1]['at']} when it lost the others"
        how = f"with {end[-1]['error']}" if end and end[-1].get("error") else "by itself"
        return f"has ended {how}" + (f" at {end[-1]['at']}" if end and end[-1]["at"] else "")
    if not told[0]["stack"]:
        return f"is in {told[0]['inside'][0]}, past the script's last line" if told[0]["inside"] else "is in no line"
    at, kind = told[0]["at"], _waits_in(events)
    number = len([each for each in of(events, "collective") if each["op"] == kind]) or len(of(events, kind))
    if not kind:
        inside = f" in {told[0]['inside'][0]}" if told[0]["inside"] else ""
        return f"is at {at}{inside}"
    return f"waits in {kind} at {at}" + (f", its {_nth(number - 1)}" if number else "")


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _nth(place: int) -> str:
    number = place + 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
