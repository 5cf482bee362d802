"""Findings about what has to be alike on all ranks: the order that they take parts of, and the first weights."""

from collections.abc import Iterator

from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Record, of, trainings


def orders(records: list[Record]) -> Iterator[Finding]:
    """LS212: every rank takes its part of an order of its own, so that some samples come twice and some never."""
    for record in records:
        passes = [next(iter(trainings(events)), None) for events in record.ranks.values()]
        whole = [each for each in passes if each is not None and each.whole and each.ids]
        if record.world < 2 or len(whole) < record.world or whole[0].loader["replicas"]:
            continue
        size = whole[0].loader["full"]
        read = [each for reading in whole for each in reading.ids]
        within = all(len(set(reading.ids)) == len(reading.ids) for reading in whole)  # else drawn with replacement
        shares = all(len(reading.ids) < size for reading in whole)
        twice = len(read) - len(set(read))
        if within and shares and size <= len(read) < size + record.world and twice >= record.world:
            says = (
                f"{record.world} ranks read {times(len(read), 'sample')} in an epoch, {len(set(read)):,} different; "
                f"{size - len(set(read)):,} of {size:,} came never: each rank takes its part of an order of its own"
            )
            yield Finding("LS212", whole[0].at, says, record.nproc)


def weights(records: list[Record]) -> Iterator[Finding]:
    """LS212: gradients are equal on all ranks, and the weights that they update are not."""
    for record in records:
        firsts = [next(iter(of(events, "step")), None) for events in record.ranks.values()]
        steps = [each for each in firsts if each is not None and each.get("weights")]
        if record.world < 2 or len(steps) < record.world or any(each["grads"] != steps[0]["grads"] for each in steps):
            continue
        if steps[0]["grads"] and len({each["digest"] for each in steps}) == len(steps):
            first, second = (next(iter(each["weights"].values()))[1] for each in steps[:2])
            says = (
                f"gradients are equal on {record.world} ranks and weights are not: after the first step "
                f"{next(iter(steps[0]['weights']))} has norm {first:.4f} on rank 0 and {second:.4f} on rank 1"
            )
            yield Finding("LS212", steps[0]["at"], says, record.nproc)
