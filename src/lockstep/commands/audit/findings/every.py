"""All findings of a script's records."""

from lockstep.commands.audit.findings import (
    devices,
    evaluating,
    failures,
    hangs,
    models,
    orders,
    rates,
    starts,
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
    starts.downloads,
    devices.shared,
    failures.known,
    weights.apart,
)
_REASONS = {"LS201", "LS208", "LS209", "LS212", "LS213", "LS302"}  # of weights that are not those of one process


def findings(records: list[Record]) -> list[Finding]:
    """What the records of all N say: for each code and line once, of the largest N."""
    found: dict[tuple[str, str], Finding] = {}
    for find in ALL:
        for each in find(records):
            known = found.get((each.code, each.at))
            if known is None or known.nproc < each.nproc:
                found[each.code, each.at] = each
    if _REASONS & {code for code, _ in found}:
        found = {key: each for key, each in found.items() if each.code != APART}
    return sorted(found.values())
