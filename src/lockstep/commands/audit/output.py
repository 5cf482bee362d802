"""An audit's result as text or JSON."""

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from lockstep.commands.audit.findings import hangs, surroundings
from lockstep.commands.audit.findings.finding import APART, Finding, times
from lockstep.commands.audit.judged import Judged
from lockstep.commands.audit.records import Record, evaluations, of, trainings
from lockstep.commands.lint.rule import RULES

_TITLES = {APART: "the weights are not those of one process"}


def text(script: Path, records: list[Record], found: list[Finding], static: list[Judged]) -> str:
    """What people read: a line for each N, the findings, what became of lint's, and their count."""
    lines = [line for record in records for line in (_told(record), *(f"    {each}" for each in _troubles(record)))]
    lines += surroundings.lines(records)
    for each in found:
        lines += ["", *_paragraph(script, each)]
    lines += [""] * bool(static)
    for judged in static:
        place = f"{judged.finding.path.name}:{judged.finding.line}"
        title = RULES[judged.finding.code].title
        lines.append(f"{place}: {judged.finding.code} by lint, {judged.verdict}: {title}")
    count = sum(not each.note for each in found)
    return "\n".join([*lines, "", f"{count} finding{'' if count == 1 else 's'}"])


def _paragraph(script: Path, each: Finding) -> list[str]:
    kind = "note" if each.note else each.code
    title = RULES[each.code].title if each.code in RULES else _TITLES[each.code]
    lines = [f"{each.at or script.name}: {kind}: {title}"]
    lines += textwrap.wrap(f"seen:   {each.says}", 116, initial_indent="    ", subsequent_indent="            ")
    if each.code in RULES:
        rule = RULES[each.code]
        lines += textwrap.wrap(f"result: {rule.result}", 116, initial_indent="    ", subsequent_indent="            ")
        first, *rest = rule.mend.splitlines()
        lines += [f"    mend:   {first}", *(f"            {line}" for line in rest)]
    return lines


def _troubles(record: Record) -> list[str]:
    """What each rank was doing when the processes were ended, or which of them failed, where and with what."""
    if waiting := hangs.lines(record):
        return waiting
    ends = {rank: end for rank, events in record.ranks.items() for end in of(events, "end") if end["how"] == "error"}
    return [f"rank {rank} failed at {end['at']}: {end['error'].splitlines()[0]}" for rank, end in ends.items()]


def _told(record: Record) -> str:
    events = record.first
    parts = [
        times(len(record.ranks), "rank"),
        times(len(trainings(events)), "training pass", "training passes"),
        times(len(of(events, "step")), "step"),
        times(len(evaluations(events)), "evaluation"),
        times(len(of(events, "collective")), "collective"),
    ]
    where = f" on {record.nodes} machines" if record.nodes > 1 else ""
    return f"N = {record.nproc}{where}: {', '.join(parts)}; {record.ended} in {record.seconds:.1f} s"


def as_json(script: Path, records: list[Record], found: list[Finding], static: list[Judged]) -> str:
    """What programs read."""
    runs = [
        {
            "nproc": each.nproc,
            "world": each.world,
            "ended": each.ended,
            "codes": each.codes,
            "seconds": each.seconds,
            "waiting": hangs.lines(each),
        }
        for each in records
    ]
    lint = [{"code": each.finding.code, "line": each.finding.line, "verdict": each.verdict} for each in static]
    return json.dumps(
        {
            "script": str(script),
            "surroundings": surroundings.lines(records),
            "runs": runs,
            "findings": [*map(asdict, found)],
            "lint": lint,
        },
        indent=2,
    )
