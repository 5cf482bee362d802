"""An audit's result as text or JSON."""

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from lockstep.commands.audit.findings.finding import Finding
from lockstep.commands.audit.records import Record, evaluations, of, trainings
from lockstep.commands.lint.rule import RULES


def text(script: Path, records: list[Record], found: list[Finding]) -> str:
    """What people read: a line for each N, the findings, their count."""
    lines = [_told(record) for record in records]
    for each in found:
        title = RULES[each.code].title if each.code in RULES else ""
        lines += ["", f"{each.at or script.name}: {each.code} {title}"]
        lines += textwrap.wrap(each.says, 116, initial_indent="    ", subsequent_indent="    ")
        if each.code in RULES:
            first, *rest = RULES[each.code].mend.splitlines()
            lines += [f"    mend:   {first}", *(f"            {line}" for line in rest)]
    return "\n".join([*lines, "", f"{len(found)} finding{'' if len(found) == 1 else 's'}"])


def _told(record: Record) -> str:
    events = next(iter(record.ranks.values()), [])
    parts = [
        f"{len(record.ranks)} rank{'' if len(record.ranks) == 1 else 's'}",
        f"{len(trainings(events))} training passes",
        f"{len(of(events, 'step'))} steps",
        f"{len(evaluations(events))} evaluations",
        f"{len(of(events, 'collective'))} collectives",
    ]
    return f"N = {record.nproc}: {', '.join(parts)}; {record.ended} in {record.seconds:.1f} s"


def as_json(script: Path, records: list[Record], found: list[Finding]) -> str:
    """What programs read."""
    runs = [
        {"nproc": each.nproc, "world": each.world, "ended": each.ended, "codes": each.codes, "seconds": each.seconds}
        for each in records
    ]
    return json.dumps({"script": str(script), "runs": runs, "findings": [asdict(each) for each in found]}, indent=2)
