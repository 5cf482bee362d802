"""Scripts under audit, and the table of what it has to say of each."""

import sys
import textwrap
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.audit.command import run
from lockstep.commands.audit.findings.every import findings
from lockstep.commands.audit.findings.finding import Finding
from lockstep.commands.audit.records import Record
from lockstep.commands.audit.settings import Audit

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Expected:
    """A row of scripts/table.toml: the codes of findings and of notes, and words of what is said."""

    path: Path
    says: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    gpu: bool = False

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"


def table() -> list[Expected]:
    """All rows, the wrong scripts first."""
    rows = tomllib.loads((SCRIPTS / "table.toml").read_text(encoding="utf-8"))
    return [
        Expected(
            SCRIPTS / kind / f"{name}.py",
            tuple(row.get("says", ())),
            tuple(row.get("notes", ())),
            tuple(row.get("words", ())),
            row.get("gpu", False),
        )
        for kind in ("wrong", "right")
        for name, row in rows[kind].items()
    ]


def audited(path: Path, *arguments: str, nproc: tuple[int, ...] = (1, 2, 4)) -> tuple[list[Record], list[Finding]]:
    """What audit records of a script, and what it says."""
    records = run(path, list(arguments), Audit(nproc=nproc))
    return records, findings(records)


def row(expected: Expected, found: list[Finding]) -> str:
    """A script's lines of the page: its name and what is said of it."""
    said = [textwrap.wrap(f"{'note:' if each.note else each.code} {each.says}", 86) for each in found] or [["clean"]]
    lines = [line if place == 0 else f"      {line}" for lines in said for place, line in enumerate(lines)]
    return "\n".join(f"{expected.name if place == 0 else '':32}{line}" for place, line in enumerate(lines))


def main() -> None:
    """Audit the scripts that the arguments name, or all, and print their rows."""
    chosen = [each for each in table() if not sys.argv[1:] or each.path.stem in sys.argv[1:]]
    for each in chosen:
        begin = time.monotonic()
        records, found = audited(each.path)
        print(row(each, found), flush=True)
        ended = [(record.nproc, record.ended) for record in records if record.ended != "done"]
        print(f"    {time.monotonic() - begin:.0f} s {ended or ''}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
