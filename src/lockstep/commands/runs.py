"""`lockstep runs`: a table of the runs below a folder, from their journals. Imports no torch."""

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from lockstep.commands.shared.arguments import parse
from lockstep.commands.shared.grid import Column, fitted, terminal_width
from lockstep.config import Names
from lockstep.config.fields import Arg, require
from lockstep.distributed.files import finite
from lockstep.errors import UserError, shown, unknown
from lockstep.monitoring.runs import STATES, RunSummary, run_folders, summarize

NOTHING = "\N{EN DASH}"


@dataclass(frozen=True)
class Listing:
    """Which runs, in what order, and how much of each."""

    state: Annotated[Names, Arg(unset="all")] = ()
    """Only runs in these states: running, silent, ended, stopped, failed, killed."""
    recipe: Annotated[Names, Arg(unset="all")] = ()
    """Only runs of these recipes."""
    match: Annotated[str, Arg(unset="all")] = ""
    """Only runs with this text in their folder's name, their recipe, data set or model."""
    sort: Literal["since", "name", "recipe", "processes", "epoch", "top1", "best", "loss", "state"] = "since"
    """By what; since, epoch and accuracies begin with the newest or highest."""
    reverse: bool = False
    """The other way round."""
    limit: int = 0
    """At most so many lines (0: all)."""
    wide: bool = False
    """All columns, however narrow the terminal is."""
    json: bool = False
    """Print all that is known of each run as JSON."""

    def __post_init__(self) -> None:
        for state in self.state:
            if state not in STATES:
                raise unknown("state", state, STATES, "Separate several with commas, as --state running,failed.")
        require(self.limit >= 0, f"--limit {self.limit} is negative", "Use 0 for all.")

    def wants(self, run: RunSummary) -> bool:
        """True for a run that shall be listed."""
        names = (str(run.folder), run.entry("recipe"), run.entry("data", "dataset"), run.entry("model", "model"))
        return (
            (not self.state or run.state in self.state)
            and (not self.recipe or run.entry("recipe") in self.recipe)
            and any(self.match in name for name in names)
        )

    def ordered(self, runs: Sequence[RunSummary]) -> list[RunSummary]:
        """The runs in the order that was asked for; those without a value come last."""
        by_name = sorted(runs, key=lambda run: str(run.folder), reverse=self.reverse)
        values = {id(run): _sort_value(run, self.sort) for run in runs}
        known = [run for run in by_name if values[id(run)] is not None]
        known.sort(key=lambda run: values[id(run)], reverse=self.reverse)
        return [*known, *(run for run in by_name if values[id(run)] is None)]


def _sort_value(run: RunSummary, by: str) -> Any:
    """What to sort by, rising; None: not known."""
    if by in ("name", "recipe"):
        return str(run.folder) if by == "name" else run.entry("recipe") or None
    value = STATES.index(run.state) if by == "state" else run.as_dict()["best_top1" if by == "best" else by]
    newest_first = by in ("since", "epoch", "top1", "best")
    return -value if newest_first and value is not None else value


def main(args: list[str]) -> int:
    """List the runs below a folder."""
    about = "Table the runs below a folder (runs, where none is named): recipe, processes, epoch, top-1, state."
    names, chosen = parse(Listing(), args, about)
    tops = [Path(name) for name in names or ["runs"]]
    for top in tops if names else ():
        if not top.is_dir():
            raise UserError(f"there is no folder {top}", "Name one that holds run folders, as `lockstep runs runs`.")
    now = time.time()
    folders = dict.fromkeys(folder for top in tops for folder in run_folders(top))
    summaries = {folder: summarize(folder, now) for folder in folders}
    found = [run for run in summaries.values() if run is not None]
    if unread := [shown(str(folder)) for folder, run in summaries.items() if run is None]:
        print(f"{len(unread)} journal(s) hold nothing that can be read: {', '.join(unread)}", file=sys.stderr)
    runs = chosen.ordered([run for run in found if chosen.wants(run)])
    if chosen.limit:
        runs = runs[: chosen.limit]
    if chosen.json:
        print(json.dumps(finite([run.as_dict() for run in runs]), indent=2))
        return 0
    if not found:
        print(f"no runs below {shown(', '.join(map(str, tops)))}: `lockstep train` makes one in runs/")
        return 0
    if not runs:
        print(f"none of {len(found)} runs is like that")
        return 0
    top = tops[0] if len(tops) == 1 else Path()
    lines, left_out = fitted(columns(runs, now, top), None if chosen.wide else terminal_width())
    print("\n".join(lines))
    if left_out:
        print(f"({', '.join(left_out)}: --wide, or --json)")
    return 0


def columns(runs: Sequence[RunSummary], now: float, top: Path) -> list[Column]:
    """The table's columns; names are those below `top`."""
    rows = [run.as_dict() for run in runs]
    below = [run.folder.relative_to(top) if run.folder.is_relative_to(top) else run.folder for run in runs]
    names = [str(path) if path.name else run.folder.name for path, run in zip(below, runs, strict=True)]

    def values(name: str, form: str = "") -> list[str]:
        return [NOTHING if row[name] is None else format(row[name], form) for row in rows]

    def entries(*path: str) -> list[str]:
        return [run.entry(*path) or NOTHING for run in runs]

    found = [
        Column("run", names, left=True),
        Column("recipe", entries("recipe"), 3, left=True),
        Column("N", values("processes")),
        Column("epoch", [f"{a}/{b}" for a, b in zip(values("epoch"), values("epochs"), strict=True)]),
        Column("top-1", values("top1", ".2%")),
        Column("best", values("best_top1", ".2%"), 4),
        Column("state", [run.state for run in runs], left=True),
        Column("since", [ago(run.since, now) for run in runs]),
        Column("images/s", values("images_per_s", ",.0f"), 5),
        Column("resumed", [f"{row['resumes'] or ''}" for row in rows], 6),
        Column("resized", [f"{row['resizes'] or ''}" for row in rows], 6),
        Column("faults", [f"{run.faults.total() or ''}" for run in runs], 7),
        Column("model", entries("model", "model"), 8, left=True),
        Column("data", entries("data", "dataset"), 9, left=True),
        Column("loss", values("loss", ".4f"), 10),
    ]
    return [column for column in found if any(column.texts)]


def ago(when: float | None, now: float) -> str:
    """How long ago, in the largest unit that makes one: 12 s, 3 min, 5 h, 2 d."""
    if when is None:
        return NOTHING
    seconds = max(0.0, now - when)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{math.floor(seconds / size):,} {unit}"
    return f"{seconds:.0f} s"
