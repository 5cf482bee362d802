"""Findings about ranks beside each other: hangs, files, downloads, GPUs."""

import itertools
import re
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.faults import Finding, times
from lockstep.commands.audit.records import Record, of

_LOST = "closed by peer|reset by peer"  # what the other ranks' errors say when one is gone
_MIXED = re.compile(r"gloo::EnforceNotMet.*preamble\D*(\d+) vs (\d+)", re.DOTALL)  # a call met another one
_STARTING = ("init_process_group", "_create_c10d_store", "rendezvous")


def where_ranks_wait(record: Record) -> list[str]:
    """What each rank was doing when the processes were ended; empty where they ended by themselves."""
    if record.ended not in ("stalled", "deadline", "failed"):
        return []
    places = {rank: _place(events) for rank, events in record.ranks.items()}
    if not any(of(events, "waiting") for events in record.ranks.values()):
        return []
    return [f"rank {rank} {words}" for rank, words in places.items()]


def apart(records: list[Record]) -> Iterator[Finding]:
    """LS308: the ranks' collectives are not the same ones, in number, kind or shape."""
    return filter(None, map(_apart, records))


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
            shapes_of = ", ".join(f"{each['shape']} on rank {rank}" for rank, each in called.items())
            first = next(iter(called.values()))
            return Finding(
                "LS308", first["at"], f"the {_nth(place)} collective, an all_reduce, is of {shapes_of}", record.nproc
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
        counts = {rank: len(of(events, kind)) for rank, events in record.ranks.items()}
        inside = {rank: _waits_in(events) for rank, events in record.ranks.items()}
        most, least = max(counts.values(), default=0), min(counts.values(), default=0)
        stuck = [rank for rank in counts if counts[rank] == most and inside[rank] == kind]
        fewer = [rank for rank in counts if counts[rank] == least]
        if most > least and stuck:
            at = of(record.ranks[stuck[0]], "waiting")[0]["at"]
            says = (
                f"{_ranks(stuck)} {'waits' if len(stuck) == 1 else 'wait'} in the {_nth(most - 1)} {calls}, which has "
            )
            says += f"DDP's collectives; {_ranks(fewer)} made {times(least, calls).replace('passs', 'passes')}"
            return Finding("LS308", at, says, record.nproc)
    return None


def _waits_in(events: list[Event]) -> str:
    """What a rank's main thread was in: a collective's name, "backward", "forward", "init_process_group" or ""."""
    waits = of(events, "waiting")
    inside = waits[0]["inside"] if waits else []
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
    waits = of(events, "waiting")
    if not waits:
        end = of(events, "end")
        if end and re.search(_LOST, str(end[-1].get("error"))):
            return f"was at {end[-1]['at']} when it lost the others"
        how = f"with {end[-1]['error']}" if end and end[-1].get("error") else "by itself"
        return f"has ended {how}" + (f" at {end[-1]['at']}" if end and end[-1]["at"] else "")
    if not waits[0]["stack"]:
        return f"is in {waits[0]['inside'][0]}, past the script's last line" if waits[0]["inside"] else "is in no line"
    at, kind = waits[0]["at"], _waits_in(events)
    number = len([each for each in of(events, "collective") if each["op"] == kind]) or len(of(events, kind))
    if not kind:
        inside = f" in {waits[0]['inside'][0]}" if waits[0]["inside"] else ""
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


# what may make a rank wait for the others: more than does, so that what is left is certain
_MEETING = {"collective", "group", "wrap", "forward", "backward", "step"}


def _met(events: list[Event], until: Event) -> list[str]:
    """The meetings before an event, in order: two ranks' events after the same ones are not ordered."""
    before = itertools.takewhile(lambda each: each is not until, events)
    return [str(each.get("op", each["event"])) for each in before if each["event"] in _MEETING]


def handed_over(records: list[Record]) -> Iterator[Finding]:
    """LS406: a rank loads what another one saves, and nothing says that it waits."""
    for record in records:
        alone = {path: ranks[0] for path, ranks in _writers(record).items() if len(ranks) == 1}
        saves = [(rank, each) for rank in sorted({*alone.values()}) for each in of(record.ranks[rank], "saved")]
        for writer, saved in saves:
            path, meetings = saved["path"], _met(record.ranks[writer], saved)
            if alone.get(path) != writer:
                continue
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


def _writers(record: Record) -> dict[str, list[int]]:
    """The files that are saved, and the ranks that save them."""
    found: dict[str, list[int]] = {}
    for rank, events in record.ranks.items():
        for path in {each["path"] for each in of(events, "saved")} - {"", "/dev/null"}:
            found.setdefault(path, []).append(rank)
    return found


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


def saves(records: list[Record]) -> Iterator[Finding]:
    """LS401: several ranks write one file."""
    for record in records:
        for path, ranks in _writers(record).items():
            if len(ranks) > 1:
                saved = next(each for each in of(record.ranks[ranks[0]], "saved") if each["path"] == path)
                says = f"{path} is written by {len(ranks)} of {times(len(record.ranks), 'rank')}"
                if record.nodes > 1 and len({record.node(each) for each in ranks}) == len(ranks):
                    says += f", by one on each of {len(ranks)} machines: on a disk that they share, over each other"
                yield Finding("LS401", saved["at"], says, record.nproc)


def shared_gpus(records: list[Record]) -> Iterator[Finding]:
    """LS303: ranks work on one GPU. LS402: a rank's tensors came from a file onto another rank's GPU."""
    for record in records:
        if of(record.first, "process") and not record.joined:
            continue  # processes that know nothing of each other: each has the machine for itself
        uses = {rank: of(events, "device") for rank, events in record.ranks.items()}
        for node in sorted({record.node(rank) for rank in uses}):
            yield from _on_one({rank: mine for rank, mine in uses.items() if record.node(rank) == node}, record.nproc)


def _on_one(uses: dict[int, list[Event]], nproc: int) -> Iterator[Finding]:
    """The findings of the ranks of one machine."""
    own = {rank: {each["index"] for each in mine if each["how"] != "load"} for rank, mine in uses.items()}
    for index in sorted(set().union(*own.values())) if len(own) > 1 else ():
        ranks = [rank for rank, mine in own.items() if index in mine]
        if len(ranks) > 1:
            at = next(each["at"] for each in uses[ranks[-1]] if each["index"] == index and each["how"] != "load")
            yield Finding("LS303", at, _says(ranks, index, own), nproc)
    for rank, mine in uses.items():
        for each in mine:
            others = [other for other, its in own.items() if other != rank and each["index"] in its]
            if each["how"] == "load" and others and each["index"] not in own[rank]:
                says = f"rank {rank} loaded onto cuda:{each['index']}, rank {others[0]}'s GPU"
                yield Finding("LS402", each["at"], says, nproc)
                break


def _says(ranks: list[int], index: int, own: dict[int, set[int]]) -> str:
    named = f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    beside = [rank for rank in ranks if len(own[rank]) > 1]
    if beside:
        others = sorted(own[beside[0]] - {index})
        return f"{named} use cuda:{index}, rank {beside[0]} beside cuda:{', cuda:'.join(map(str, others))}"
    return f"{named} all use cuda:{index}: NCCL refuses two ranks on one GPU, and others are idle"


def without_local_rank(records: list[Record], others: list[Record]) -> Iterator[Finding]:
    """LS304: without the argument, which torchrun doesn't give, ranks fail or share a GPU."""
    del records
    for record in (each for each in others if each.purpose == "bare"):
        ends = [(rank, each) for rank, events in record.ranks.items() for each in of(events, "end")]
        failed = next(((rank, each) for rank, each in ends if each["how"] != "done"), None)
        shared = next((each for each in shared_gpus([record]) if each.code == "LS303"), None)
        if shared is not None:
            yield Finding("LS304", shared.at, f"started as by torchrun, without it: {shared.says}", record.nproc)
        elif record.ended == "failed" and failed is not None:
            rank, end = failed
            error = str(end.get("error") or f"exit code {end.get('code')}").partition("\n")[0]
            says = f"started as by torchrun, without it, rank {rank} fails with {error}"
            yield Finding("LS304", end["at"], says, record.nproc)


def ordinals(records: list[Record]) -> Iterator[Finding]:
    """LS303: a rank asks for a GPU that its machine does not have."""
    for record in records:
        for rank, events in record.ranks.items():
            for end in of(events, "end"):
                if "invalid device ordinal" not in str(end.get("error")):
                    continue
                node = record.node(rank)
                local = rank - min(each for each in record.ranks if record.node(each) == node)
                who = f"rank {rank}, local rank {local} of machine {node}," if record.nodes > 1 else f"rank {rank}"
                error = end["error"].partition("\n")[0]
                yield Finding("LS303", end["at"], f"{who} failed with {error}", record.nproc)
                return
