"""Findings about scripts that fail: errors whose cause is one of lint's faults."""

import re
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import Finding
from lockstep.commands.audit.records import Record, of

# what an error says -> the code of its cause
_CAUSES = {
    r"sampler option is mutually exclusive with shuffle": "LS103",
    r"[Dd]efault process group has not been initialized": "LS307",
    r"before the\s+current process has finished its bootstrapping phase": "LS314",
    r"Cannot re-initialize CUDA in forked subprocess": "LS315",
    r"invalid device ordinal": "LS303",
}


def known(records: list[Record]) -> Iterator[Finding]:
    """The findings of errors that say what is wrong."""
    for record in records:
        ends = [end for events in _every(record) for end in of(events, "end") if end["how"] == "error"]
        for cause, code in _CAUSES.items():
            told = next((each for each in ends if re.search(cause, each["error"])), None)
            printed = any(re.search(cause, text) for text in record.printed) if record.ended == "failed" else False
            if told is not None:
                error = told["error"].partition("\n")[0]
                yield Finding(code, told["at"], f"{_who(record, told['pid'])} failed with {error}", record.nproc)
            elif printed and code == "LS314":
                says = "the processes that it spawned imported it and began to spawn too, and failed"
                yield Finding(code, "", says, record.nproc)


def _every(record: Record) -> list[list[Event]]:
    return [*record.ranks.values(), *record.others.values()]


def _who(record: Record, pid: int) -> str:
    rank = next((rank for rank, events in record.ranks.items() if any(each["pid"] == pid for each in events)), None)
    if rank is None or record.nodes < 2:
        return "a process" if rank is None else f"rank {rank}"
    node = record.node(rank)
    local = rank - min(each for each in record.ranks if record.node(each) == node)
    return f"rank {rank}, local rank {local} of machine {node},"
