"""Findings about who read what: orders that repeat, and parts that are taken for the whole."""

import itertools
from collections.abc import Iterator

from lockstep.commands.audit.findings.finding import Finding
from lockstep.commands.audit.records import Record, trainings


def repeated(records: list[Record]) -> Iterator[Finding]:
    """LS101: two epochs' orders are one, where a sampler shuffles over processes."""
    for record in records:
        for events in list(record.ranks.values())[:1]:
            passes = [each for each in trainings(events) if each.whole and each.ids]
            for first, second in itertools.pairwise(passes):
                alike = first.ids == second.ids and first.loader["loader"] == second.loader["loader"]
                if alike and second.loader["replicas"] and first.ids != sorted(first.ids):
                    number, before = second.number + 1, first.number + 1
                    says = f"epoch {number} had epoch {before}'s order: all {len(first.ids):,} samples of a rank"
                    yield Finding("LS101", second.at, says, record.nproc)
                    break
