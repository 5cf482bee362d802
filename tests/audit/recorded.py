"""Scripts under audit, and the table of what it has to say of each."""

import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.audit.faults import Finding
from lockstep.commands.audit.findings import findings
from lockstep.commands.audit.launch import other_starts, start, starter
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.records import Record
from tests.diffs import edited, places

SCRIPTS = Path(__file__).parent / "scripts"
_MADE = tempfile.TemporaryDirectory(prefix="scripts-")  # those of which a file NAME.diff says what they change


@dataclass(frozen=True)
class Expected:
    """A row of scripts/table.toml: the codes of findings and of notes, and words of what is said."""

    path: Path
    says: Sequence[str] = ()
    notes: Sequence[str] = ()
    words: Sequence[str] = ()
    gpu: bool = False
    nodes: int = 1
    needs: str = ""
    exact: bool = True
    """Whether the sentences are the same in every run: where ranks wait for each other, who is seen first is not."""

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"


def script(kind: str, name: str) -> Path:
    """The file, or what its diff makes of another one."""
    path = SCRIPTS / kind / f"{name}.py"
    if path.exists():
        return path
    edits = places(path.with_suffix(".diff").read_text(encoding="utf-8"))
    text = (SCRIPTS / edits[0][0]).read_text(encoding="utf-8")
    for edit in edits:
        text = edited(text, edit)
    made = Path(_MADE.name, kind, path.name)
    made.parent.mkdir(exist_ok=True)
    made.write_text(text, encoding="utf-8")
    return made


def table() -> list[Expected]:
    """All rows, the wrong scripts first."""
    rows = tomllib.loads((SCRIPTS / "table.toml").read_text(encoding="utf-8"))
    return [Expected(script(kind, name), **row) for kind in ("wrong", "right") for name, row in rows[kind].items()]


Process = subprocess.Popen[str]


@contextmanager
def starting() -> Iterator[Process]:
    """A process that starts scripts, for many of them: each `lockstep audit` has one of its own."""
    with starter(SCRIPTS / "right/accumulation.py") as process:
        yield process


def audited(
    path: Path,
    *arguments: str,
    process: Process,
    nproc: tuple[int, ...] = (1, 2, 4),
    deadline_s: float = 400.0,
    nodes: int = 1,
) -> tuple[list[Record], list[Finding]]:
    """What audit records of a script, and what it says."""
    records = list[Record]()
    with tempfile.TemporaryDirectory() as folder:
        for n in nproc:
            plan = Plan("", (), "", "", "", n, deadline_s=deadline_s, nodes=1 if n % nodes else nodes)
            records.append(start(process, path, list(arguments), plan, Path(folder) / str(n)))
            if records[-1].ended != "done":
                break
        plan = Plan("", (), "", "", "", 1, deadline_s=deadline_s)
        others = other_starts(process, path, list(arguments), plan, Path(folder), records)
    return records, findings(records, others)


def row(expected: Expected, found: list[Finding]) -> str:
    """A script's lines of the page: its name and what is said of it."""
    said = [textwrap.wrap(f"{'note:' if each.note else each.code} {each.says}", 86) for each in found] or [["clean"]]
    lines = [line if place == 0 else f"      {line}" for lines in said for place, line in enumerate(lines)]
    return "\n".join(f"{expected.name if place == 0 else '':32}{line}" for place, line in enumerate(lines))


def main() -> None:
    """Audit the scripts that the arguments name, or all, and print their rows."""
    chosen = [each for each in table() if not sys.argv[1:] or each.path.stem in sys.argv[1:]]
    with starting() as process:
        for each in chosen:
            records, found = audited(each.path, process=process, nodes=each.nodes)
            print(row(each, found), flush=True)
            seconds = [f"N = {record.nproc} {record.ended} in {record.seconds:.1f} s" for record in records]
            print(f"    {', '.join(seconds)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
