"""Findings about the model: how it is wrapped, where it lies, and what is drawn for it."""

from collections.abc import Iterator

from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Record, of, trainings


def masks(records: list[Record]) -> Iterator[Finding]:
    """LS211: all ranks drew from generators in the same state. LS110: a rank's workers did."""
    for record in records:
        draws = [[each for each in of(events, "draw") if each["what"] == "forward"] for events in record.ranks.values()]
        for place in range(min(map(len, draws), default=0)):
            now = [each[place] for each in draws]
            alike = {kind for kind in ("torch", "cuda") if all(kind in each["drew"] for each in now)}
            if len(now) > 1 and any(len({each["states"][kind] for each in now}) == 1 for kind in alike):
                says = f"all {len(now)} ranks drew the same numbers in training pass {place + 1}: equal dropout masks"
                yield Finding("LS211", now[0]["at"], says, record.nproc)
                break
        yield from _workers(record)


def _workers(record: Record) -> Iterator[Finding]:
    parents = {events[0]["pid"]: rank for rank, events in record.ranks.items() if events}
    seen: dict[tuple[int, str, str], set[int]] = {}
    for events in record.others.values():
        first = next(iter(of(events, "process")), None)
        draw = next((each for each in of(events, "draw") if each["what"] == "data"), None)
        if first is None or draw is None or draw["worker"] is None or first["parent"] not in parents:
            continue
        for kind in draw["drew"]:
            seen.setdefault((parents[first["parent"]], kind, draw["states"][kind]), set()).add(draw["worker"])
    for (rank, kind, _), workers in seen.items():
        if len(workers) > 1:
            at = next((each.at for each in trainings(record.ranks[rank])), "")
            says = f"{len(workers)} workers of rank {rank} drew the same numbers from {kind}'s generator"
            yield Finding("LS110", at, says, record.nproc)
            return


def wrapping(records: list[Record]) -> Iterator[Finding]:
    """LS213: converted late. LS301: moved late. LS302: trained unwrapped. LS313: nothing was unused."""
    for record in records:
        events = record.first
        wraps = [each for each in of(events, "wrap") if each["kind"] == "ddp"]
        for each in of(events, "wrap"):
            if each["kind"] == "syncbn" and each["wrapped"] and each["batch_norms"]:
                says = f"{times(each['batch_norms'], 'layer')} of batch norm converted after DDP had wrapped the model"
                yield Finding("LS213", each["at"], says, record.nproc)
        if not wraps:
            continue
        forwards = [each for reading in trainings(events) for each in of(reading.events, "forward") if each["grad"]]
        wrapped = [each for each in forwards if each["wrapped"]]
        if wrapped and wrapped[0]["devices"] != wraps[0]["devices"] and len(wraps) == 1:
            says = f"wrapped on {', '.join(wraps[0]['devices'])}, trained on {', '.join(wrapped[0]['devices'])}"
            yield Finding("LS301", wraps[0]["at"], says, record.nproc)
        bare = [each for each in forwards if not each["wrapped"]]
        steps = of(events, "step")
        if bare and not wrapped and record.world > 1 and steps:
            says = f"{times(len(bare), 'training pass', 'training passes')} went past DDP{_apart(record)}"
            yield Finding("LS302", bare[0]["at"], says, record.nproc)
        whole = [each for each in steps if each.get("weights") and len(each["grads"]) == len(each["weights"])]
        examined = [each for each in steps if each.get("weights")]
        if wraps[0]["find_unused"] and examined and len(whole) == len(examined) and len(wraps) == 1:
            says = f"all {len(whole[0]['weights'])} parameters got gradients in each of {times(len(whole), 'step')}"
            yield Finding("LS313", wraps[0]["at"], says, record.nproc)


def _apart(record: Record) -> str:
    """From which step on the ranks' weights differ."""
    steps = [of(events, "step") for events in record.ranks.values()]
    for place, now in enumerate(zip(*steps, strict=False)):
        if len({each.get("digest") for each in now}) > 1:
            return f", and the ranks' weights differ from step {place + 1} on"
    return ""
