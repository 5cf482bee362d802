"""All findings of a script's records."""

from lockstep.commands.audit.findings import devices, orders, rates
from lockstep.commands.audit.findings.finding import Find, Finding
from lockstep.commands.audit.records import Record

ALL: tuple[Find, ...] = (devices.shared, orders.repeated, rates.unadjusted)


def findings(records: list[Record]) -> list[Finding]:
    """What the records of all N say: for each code and line once, of the largest N."""
    found: dict[tuple[str, str], Finding] = {}
    for find in ALL:
        for each in find(records):
            known = found.get((each.code, each.at))
            if known is None or known.nproc < each.nproc:
                found[each.code, each.at] = each
    return sorted(found.values())
