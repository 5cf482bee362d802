"""All findings of a script's records."""

import itertools
from collections.abc import Sequence

from lockstep.commands.audit.findings import (
    bare,
    devices,
    evaluating,
    failures,
    hangs,
    models,
    orders,
    races,
    rates,
    resumed,
    starts,
    telling,
    waits,
    weights,
)
from lockstep.commands.audit.findings.finding import APART, Find, Finding
from lockstep.commands.audit.records import Record

ALL: tuple[Find, ...] = (
    orders.repeated,
    orders.misaligned,
    orders.split_apart,
    orders.begun_apart,
    evaluating.parts,
    evaluating.training_set,
    evaluating.modes,
    rates.adjusted,
    rates.schedulers,
    rates.remainders,
    rates.clipped,
    rates.undivided,
    hangs.apart,
    waits.each_step,
    waits.accumulated,
    models.masks,
    models.wrapping,
    starts.ports,
    starts.ends,
    starts.backends,
    starts.saves,
    starts.loads,
    races.handed_over,
    races.downloads,
    devices.shared,
    failures.known,
    telling.unreduced,
    telling.means_of_means,
    telling.plateaus,
    telling.first_parts,
    telling.pixels,
    weights.apart,
)
_REASONS = {"LS201", "LS208", "LS209", "LS212", "LS213", "LS302"}  # of weights that are not those of one process


BESIDE = (resumed.anew, bare.launched)  # of the usual starts and of others


def findings(records: list[Record], others: Sequence[Record] = ()) -> list[Finding]:
    """What the records of all N, and of starts beside them, say: for each code and line once, of the largest N."""
    found: dict[tuple[str, str], Finding] = {}
    every = [find(records) for find in ALL] + [find(records, list(others)) for find in BESIDE]
    for each in itertools.chain(*every):
        known = found.get((each.code, each.at))
        if known is None or known.nproc < each.nproc:
            found[each.code, each.at] = each
    if _REASONS & {code for code, _ in found}:
        found = {key: each for key, each in found.items() if each.code != APART}
    return sorted(found.values())
