"""Findings about steps, batches and rates on N processes."""

from collections.abc import Iterator

from lockstep.commands.audit.findings.finding import Finding
from lockstep.commands.audit.records import Record, of, trainings


def steps_of_an_epoch(record: Record) -> int:
    """Optimizer steps of the first rank in its first whole training pass; 0 where there is none."""
    events = next(iter(record.ranks.values()), [])
    first = next((each for each in trainings(events) if each.whole), None)
    return 0 if first is None else len(of(first.events, "step"))


def unadjusted(records: list[Record]) -> Iterator[Finding]:
    """LS208: on N processes an epoch has fewer steps, and the rate is the same."""
    one = next((each for each in records if each.world == 1), None)
    if one is None:
        return
    steps, rates = steps_of_an_epoch(one), _first_rates(one)
    for record in records:
        fewer = steps_of_an_epoch(record)
        if record.world == 1 or not fewer or not steps or _first_rates(record) != rates:
            continue
        if steps / fewer > 1 + 0.5 * (record.world - 1):
            step = next(each for each in of(record.ranks[0], "step"))
            says = (
                f"on {record.world} processes {steps / fewer:.1f} x fewer steps at the same rate: "
                f"{fewer} steps an epoch instead of {steps}, at {rates[0]:g}"
            )
            yield Finding("LS208", step["at"], says, record.nproc)


def _first_rates(record: Record) -> list[float]:
    step = next(iter(of(next(iter(record.ranks.values()), []), "step")), None)
    return step["lr"] if step else []
