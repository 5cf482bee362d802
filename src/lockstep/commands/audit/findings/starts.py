"""Findings about how processes start, meet and end, and about files."""

from collections.abc import Iterator

from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Record, of


def ports(records: list[Record]) -> Iterator[Finding]:
    """LS305: the same port in every start, and the script's own."""
    groups = [next(iter(of(record.first, "group")), None) for record in records]
    seen = [each for each in groups if each is not None]
    own = {each["port"] for each in seen if each["own_port"] and not (each["init_method"] or "").startswith("tcp")}
    methods = {each["init_method"] for each in seen if (each["init_method"] or "").startswith(("tcp", "file"))}
    if len(seen) > 1 and len(own | methods) == 1 and all(each["own_port"] or each["init_method"] for each in seen):
        where = next(iter(own | methods))
        if where:
            says = (
                f"{len(seen)} starts met at {where if methods else f'port {where}'} each time: a second run there fails"
            )
            yield Finding("LS305", seen[0]["at"], says, records[-1].nproc)


def ends(records: list[Record]) -> Iterator[Finding]:
    """LS306: the group is there when the process ends."""
    for record in records:
        left = [
            rank
            for rank, events in record.ranks.items()
            if of(events, "group") and not of(events, "group-end", "cut") and _ended_well(record, rank)
        ]
        if left and len(left) == len(record.ranks):
            at = of(record.ranks[left[0]], "group")[0]["at"]
            says = f"{times(len(left), 'process', 'processes')} ended with the group still there"
            yield Finding("LS306", at, says, record.nproc)


def _ended_well(record: Record, rank: int) -> bool:
    return any(each["how"] == "done" for each in of(record.ranks[rank], "end"))


def backends(records: list[Record]) -> Iterator[Finding]:
    """LS316: NCCL, and everything lies on the CPU."""
    for record in records:
        group = next(iter(of(record.first, "group")), None)
        devices = {device for each in of(record.first, "forward") for device in each["devices"]}
        if group and str(group["backend"]).lower() == "nccl" and devices == {"cpu"}:
            says = "the backend is nccl, and every parameter lies on the CPU"
            yield Finding("LS316", group["at"], says, record.nproc)


def saves(records: list[Record]) -> Iterator[Finding]:
    """LS401: several ranks write one file. LS403: names begin with `module.`."""
    for record in records:
        writers: dict[str, set[int]] = {}
        for rank, events in record.ranks.items():
            for each in of(events, "saved"):
                if each["path"] and each["path"] != "/dev/null":
                    writers.setdefault(each["path"], set()).add(rank)
        for path, ranks in writers.items():
            if len(ranks) > 1:
                rank = min(ranks)
                saved = next(each for each in of(record.ranks[rank], "saved") if each["path"] == path)
                says = f"{path} is written by {len(ranks)} of {times(len(record.ranks), 'rank')}"
                if record.nodes > 1 and len({record.node(each) for each in ranks}) == len(ranks):
                    says += f", by one on each of {len(ranks)} machines: on a disk that they share, over each other"
                yield Finding("LS401", saved["at"], says, record.nproc)
        for each in of(record.first, "saved"):
            if each["module"]:
                yield Finding("LS403", each["at"], f"the names in {each['path']} begin with `module.`", record.nproc)


def loads(records: list[Record]) -> Iterator[Finding]:
    """LS405: unpickled."""
    for record in records:
        for each in of(record.first, "loaded"):
            if each["weights_only"] is False:
                yield Finding("LS405", each["at"], f"{each['path']} is unpickled without weights_only", record.nproc)
