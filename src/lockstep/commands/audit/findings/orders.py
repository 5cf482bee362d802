"""Findings about who read what in training: orders that repeat, samplers of another set, splits that differ."""

import itertools
from collections.abc import Iterator

from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Record, evaluations, trainings


def repeated(records: list[Record]) -> Iterator[Finding]:
    """LS101: two epochs' orders are one, where a sampler shuffles over processes."""
    for record in records:
        for first, second in itertools.pairwise(each for each in trainings(record.first) if each.whole and each.ids):
            alike = first.ids == second.ids and first.loader["loader"] == second.loader["loader"]
            if alike and second.loader["replicas"] and first.ids != sorted(first.ids):
                number, before = second.number + 1, first.number + 1
                says = f"epoch {number} had epoch {before}'s order: all {times(len(first.ids), 'sample')} of rank 0"
                yield Finding("LS101", second.at, says, record.nproc)
                break


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
    """LS212: the ranks' training sets are different parts of one set."""
    for record in records:
        passes = [next((each for each in trainings(events) if each.whole), None) for events in record.ranks.values()]
        whole = [each for each in passes if each is not None and each.ids]
        if len(whole) < 2 or len(whole) < record.world or not whole[0].loader["replicas"]:
            continue
        together = len(set().union(*(each.ids for each in whole)))
        length = whole[0].loader["length"]
        if together > length and all(each.loader["length"] == length for each in whole):
            says = (
                f"{record.world} ranks trained on {together:,} different samples of a set of {length:,}: "
                "each has drawn a split of its own"
            )
            yield Finding("LS212", whole[0].at, says, record.nproc)
