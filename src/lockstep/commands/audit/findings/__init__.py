"""What the records say: pure functions from the events of all N to findings, and all of them together."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from lockstep.commands.audit.faults import APART, Finding
from lockstep.commands.audit.findings import numbers, ranks, samples, steps, weights
from lockstep.commands.audit.records import Record

ALL: tuple[Callable[[list[Record]], Iterator[Finding]], ...] = (
    *(samples.repeated, samples.misaligned, samples.split_apart, samples.begun_apart),
    *(samples.parts, samples.training_set, samples.modes),
    *(steps.adjusted, steps.schedulers, steps.remainders, steps.clipped, steps.undivided),
    *(steps.masks, steps.unwrapped),
    *(ranks.apart, ranks.saves, ranks.handed_over, ranks.downloads, ranks.shared_gpus, ranks.ordinals),
    *(numbers.unreduced, numbers.means_of_means, numbers.plateaus),
    weights.apart,
)
OTHER_STARTS = weights.resumed, ranks.without_local_rank
_REASONS = {"LS201", "LS208", "LS209", "LS212", "LS302"}  # of weights that are not those of one process


def findings(records: list[Record], others: Sequence[Record] = ()) -> list[Finding]:
    """What the records of all N, and of other starts, say: for each code and line once, of the largest N."""
    found: dict[tuple[str, str], Finding] = {}
    every = [find(records) for find in ALL] + [find(records, list(others)) for find in OTHER_STARTS]
    for each in itertools.chain(*every):
        known = found.get((each.code, each.at))
        if known is None or known.nproc < each.nproc:
            found[each.code, each.at] = each
    if _REASONS & {code for code, _ in found}:
        found = {key: each for key, each in found.items() if each.code != APART}
    return sorted(found.values())
