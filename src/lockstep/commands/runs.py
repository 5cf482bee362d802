"""`lockstep runs`: a table of the runs below a folder, as their journals tell. Imports no torch."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from lockstep.commands.shared.arguments import parse
from lockstep.commands.shared.grid import Column, fitted, terminal_width
from lockstep.config import Names
from lockstep.config.fields import require
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError, unknown
from lockstep.processes.files import finite
from lockstep.watch.outside import STATES, Glance, look, run_folders

NOTHING = "\N{EN DASH}"


@dataclass(frozen=True)
class Listing:
    """Which runs, in what order, and how much of each."""

    state: Annotated[Names, arg(help_behavior_hint="(default: all)")] = ()
    """Only runs in these states: running, silent, ended, stopped, failed, killed."""
    recipe: Annotated[Names, arg(help_behavior_hint="(default: all)")] = ()
    """Only runs of these recipes."""
    match: Annotated[str, arg(help_behavior_hint="(default: all)")] = ""
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

    def wants(self, run: Glance) -> bool:
        """True for a run that shall be listed."""
        names = (str(run.folder), run.of("recipe"), run.of("data", "dataset"), run.of("model", "model"))
        return (
            (not self.state or run.state in self.state)
            and (not self.recipe or run.of("recipe") in self.recipe)
            and any(self.match in name for name in names)
        )

    def ordered(self, runs: Sequence[Glance]) -> list[Glance]:
        """The runs in the order that was asked for; what a run does not tell comes last."""
        value = _SORTED[self.sort]
        by_name = sorted(runs, key=lambda run: str(run.folder), reverse=self.reverse)
        known = sorted((run for run in by_name if value(run) is not None), key=value, reverse=self.reverse)
        return [*known, *(run for run in by_name if value(run) is None)]


def _falling(name: str) -> Callable[[Glance], Any]:
    """Begins with the highest."""

    def value(run: Glance) -> float | None:
        found: float | None = getattr(run, name)
        return None if found is None else -found

    return value


_SORTED: dict[str, Callable[[Glance], Any]] = {
    "since": _falling("since"),
    "epoch": _falling("epoch"),
    "top1": _falling("top1"),
    "best": _falling("best_top1"),
    "loss": lambda run: run.loss,
    "processes": lambda run: run.processes,
    "name": lambda run: str(run.folder),
    "recipe": lambda run: run.of("recipe") or None,
    "state": lambda run: STATES.index(run.state),
}


def main(args: list[str]) -> int:
    """List the runs below a folder."""
    names, rest = split_arguments(args, Listing)
    about = "Table the runs below a folder (runs, where none is named): recipe, processes, epoch, top-1, state."
    chosen: Listing = parse(Listing, Listing(), rest, "lockstep runs [FOLDER ...]", about)
    tops = [Path(name) for name in names or ["runs"]]
    for top in tops if names else ():
        if not top.is_dir():
            raise UserError(f"there is no folder {top}", "Name one that holds run folders, as `lockstep runs runs`.")
    now = time.time()
    folders = dict.fromkeys(folder for top in tops for folder in run_folders(top))
    found = [run for folder in folders if (run := look(folder, now)) is not None]
    runs = chosen.ordered([run for run in found if chosen.wants(run)])
    if chosen.limit:
        runs = runs[: chosen.limit]
    if chosen.json:
        print(json.dumps([as_plain(run) for run in runs], indent=2))
        return 0
    if not found:
        print(f"no runs below {', '.join(map(str, tops))}: `lockstep train` makes one in runs/")
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


def as_plain(run: Glance) -> dict[str, Any]:
    """A run's values, ready for JSON."""
    plain: dict[str, Any] = finite(asdict(run) | {"folder": str(run.folder)})
    return plain


def columns(runs: Sequence[Glance], now: float, top: Path) -> list[Column]:
    """The table's columns; names are those below `top`."""
    below = [run.folder.relative_to(top) if run.folder.is_relative_to(top) else run.folder for run in runs]
    names = [str(path) if path.name else run.folder.name for path, run in zip(below, runs, strict=True)]
    faults = [f"{len(run.faults)}" if run.faults else "" for run in runs]
    resumes = [f"{run.resumes}" if run.resumes else "" for run in runs]
    found = [
        Column("run", names, left=True),
        Column("recipe", [run.of("recipe") or NOTHING for run in runs], 3, left=True),
        Column("N", [_or_nothing(run.processes) for run in runs]),
        Column("epoch", [f"{_or_nothing(run.epoch)}/{_or_nothing(run.epochs)}" for run in runs]),
        Column("top-1", [percent(run.top1) for run in runs]),
        Column("best", [percent(run.best_top1) for run in runs], 4),
        Column("state", [run.state for run in runs], left=True),
        Column("since", [ago(run.since, now) for run in runs]),
        Column("images/s", [_or_nothing(run.images_per_s, ",.0f") for run in runs], 5),
        Column("resumed", resumes, 6),
        Column("faults", faults, 7),
        Column("model", [run.of("model", "model") or NOTHING for run in runs], 8, left=True),
        Column("data", [run.of("data", "dataset") or NOTHING for run in runs], 9, left=True),
        Column("loss", [_or_nothing(run.loss, ".4f") for run in runs], 10),
    ]  # fmt: skip
    return [column for column in found if any(column.texts)]


def _or_nothing(value: float | None, form: str = "") -> str:
    return NOTHING if value is None else format(value, form)


def percent(value: float | None) -> str:
    """A fraction as 97.22%."""
    return NOTHING if value is None else f"{value:.2%}"


def ago(when: float | None, now: float) -> str:
    """How long ago, in the largest unit that makes one: 12 s, 3 min, 5 h, 2 d."""
    if when is None:
        return NOTHING
    seconds = max(0.0, now - when)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{math.floor(seconds / size):,} {unit}"
    return f"{seconds:.0f} s"
