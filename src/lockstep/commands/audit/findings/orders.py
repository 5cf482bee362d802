"""Findings about who read what in training: orders that repeat, samplers of another set, splits that differ."""

import itertools
from collections.abc import Iterator

from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Reading, Record, evaluations, of, trainings


def repeated(records: list[Record]) -> Iterator[Finding]:
    """LS101: two epochs' orders are one, where processes share out a shuffled order."""
    for record in records:
        for first, second in itertools.pairwise(each for each in trainings(record.first) if each.whole and each.ids):
            alike = first.ids == second.ids and first.loader["loader"] == second.loader["loader"]
            if alike and not first.ascending and (second.loader["replicas"] or _shared_out(record, first)):
                number, before = second.number + 1, first.number + 1
                says = f"epoch {number} had epoch {before}'s order: all {times(len(first.ids), 'sample')} of rank 0"
                yield Finding("LS101", second.at, says, record.nproc)
                break


def _shared_out(record: Record, mine: Reading) -> bool:
    """Whether other ranks read other samples in this pass: a sampler of the script's own, with epochs, deals them."""
    if mine.epoch is None:
        return False
    others = [each for events in list(record.ranks.values())[1:] for each in trainings(events)]
    same = [set(each.ids) for each in others if each.number == mine.number and each.ids]
    return bool(same) and not any(ids & set(mine.ids) for ids in same)


def misaligned(records: list[Record]) -> Iterator[Finding]:
    """LS102: the sampler draws indices of a set of another length than the loader's."""
    for record in records:
        for each in trainings(record.first) + evaluations(record.first):
            if each.loader.get("aligned") is False:
                drawn, held = each.loader["sampled"], each.loader["length"]
                largest = max(each.ids, default=0)
                says = (
                    f"the sampler's set has {times(drawn, 'sample')} and the loader's {held:,}: "
                    f"no index above {largest:,} was read"
                )
                yield Finding("LS102", each.at, says, record.nproc)


def split_apart(records: list[Record]) -> Iterator[Finding]:
    """LS212: the ranks drew different splits, or cut their parts from different orders."""
    for record in records:
        passes = [next((each for each in trainings(events) if each.whole), None) for events in record.ranks.values()]
        whole = [each for each in passes if each is not None and each.ids]
        if len(whole) < 2 or len(whole) < record.world:
            continue
        together, read = len(set().union(*(each.ids for each in whole))), sum(len(each.ids) for each in whole)
        length, full = whole[0].loader["length"], whole[0].loader["full"]
        alike = all(each.loader["length"] == length for each in whole)
        once = all(len(set(each.ids)) == len(each.ids) for each in whole)  # else drawn with replacement, on purpose
        if whole[0].loader["replicas"] and together > length and alike:
            says = (
                f"{record.world} ranks trained on {together:,} different samples of a set of {length:,}: "
                "each has drawn a split of its own"
            )
            yield Finding("LS212", whole[0].at, says, record.nproc)
        elif once and not whole[0].loader["replicas"] and abs(read - full) < record.world and together < 0.98 * full:
            says = (
                f"{record.world} ranks read {read:,} samples of a set of {full:,}, and {full - together:,} of it "
                "never: each has cut its part from an order of its own"
            )
            yield Finding("LS212", whole[0].at, says, record.nproc)


def begun_apart(records: list[Record]) -> Iterator[Finding]:
    """LS212: the ranks' weights differ, although their gradients are the same."""
    for record in records:
        if record.world < 2 or any(of(events, "wrap") for events in record.ranks.values()):
            continue
        first = [next(iter(of(events, "step")), None) for events in record.ranks.values()]
        steps = [each for each in first if each is not None and each.get("weights")]
        if len(steps) < 2 or len({str(each["grads"]) for each in steps}) > 1:
            continue
        apart = [name for name in steps[0]["weights"] if len({str(each["weights"].get(name)) for each in steps}) > 1]
        if apart:
            says = (
                f"the weights of {record.world} ranks differ after the first step by equal gradients, first in "
                f"{apart[0]}: each rank has drawn initial weights of its own"
            )
            yield Finding("LS212", steps[0]["at"], says, record.nproc)
