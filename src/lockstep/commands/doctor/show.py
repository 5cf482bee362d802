"""What `lockstep doctor` prints."""

import json
from collections import Counter
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from lockstep.commands.doctor.finding import Finding, Status

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
_CHECK = 18  # characters


def show(finding: Finding, console: Console | None = None) -> None:
    """One line, and its remedy below where it has one."""
    console = console or Console(highlight=False)
    line = Text(f"{finding.status:<8}", style=_COLOURS[finding.status])
    line.append(f"{finding.check:<{_CHECK}} ", style="bold").append(finding.message, style="default")
    console.print(line, soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"{'':<8}{'':<{_CHECK}} -> {finding.remedy}"), soft_wrap=True)


def summary(found: list[Finding]) -> str:
    """How many are how."""
    counts = Counter(finding.status for finding in found)
    names: dict[Status, str] = {"ok": "ok", "warn": "warning(s)", "fail": "failure(s)", "skipped": "skipped"}
    return ", ".join(f"{counts[status]} {name}" for status, name in names.items())


def healthy(found: list[Finding]) -> bool:
    """True where no check failed."""
    return all(finding.status != "fail" for finding in found)


def as_json(found: list[Finding]) -> str:
    """All findings, for programs."""
    return json.dumps({"healthy": healthy(found), "findings": [asdict(each) for each in found]}, indent=2)
