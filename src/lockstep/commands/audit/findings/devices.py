"""Findings about GPUs: several ranks on one of them."""

from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import Finding
from lockstep.commands.audit.records import Record, of


def shared(records: list[Record]) -> Iterator[Finding]:
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
