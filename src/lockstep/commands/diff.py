"""`lockstep diff`: what differs between two runs, in config, environment, order and result. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.commands.shared.arguments import parse
from lockstep.commands.shared.grid import Column, fitted, printable, terminal_width
from lockstep.config.flags import split_arguments
from lockstep.config.plain import differences
from lockstep.errors import UserError
from lockstep.watch.outside import JOURNAL, group, notable, number, text, whole

EXPERIMENT, PLACE, ENVIRONMENT, ORDER, RESULT = "experiment", "where and how", "environment", "order", "result"
_PLACE = ("execution", "recovery", "recipe")  # groups and entries of a config that are no part of the experiment
_ORDER = ("batch_size", "seed", "val_fraction", "fraction", "drop_last", "balance", "aug_repeats", "dataset")
_ABSENT = "(none)"


@dataclass(frozen=True)
class Comparison:
    """How to say it."""

    strict: bool = False
    """Exit code 1 also where only the results differ."""
    wide: bool = False
    """Whole values, however narrow the terminal is."""
    json: bool = False
    """Print the differences as JSON."""


@dataclass(frozen=True)
class Told:
    """What a run's folder tells that another one's may tell otherwise."""

    folder: Path
    config: dict[str, Any]
    run: dict[str, Any]  # the newest `run` record, or nothing
    end: dict[str, Any]  # the last record, where it is an `end`
    evaluated: dict[str, Any]  # the last `eval` record


Difference = tuple[str, str, str]  # of what, the first run's, the other's


def main(args: list[str]) -> int:
    """Say what differs between two runs; the exit code is 1 where something of the experiment does."""
    names, rest = split_arguments(args, Comparison)
    about = (
        "Say what differs between two runs. Exit codes are those of diff: 0 the same experiment, 1 another one (by "
        "config, data or order), 2 something can't be read."
    )
    chosen: Comparison = parse(Comparison, Comparison(), rest, "lockstep diff RUN RUN", about)
    if len(names) != 2:
        given = f"got {' '.join(names)}" if names else "got none"
        raise UserError(f"diff takes two run folders, {given}", "As `lockstep diff runs/a runs/b`.")
    one, other = (told(Path(name)) for name in names)
    found = compared(one, other)
    same = not (found[EXPERIMENT] or found[ORDER] or (chosen.strict and found[RESULT]))
    if chosen.json:
        plain = {part: {what: [a, b] for what, a, b in lines} for part, lines in found.items()}
        print(json.dumps({"runs": names, "same_experiment": same, "differs": plain}, indent=2))
    else:
        print("\n".join(written(found, names, None if chosen.wide else terminal_width())))
    return 0 if same else 1


def told(folder: Path) -> Told:
    """What a run folder tells. Raises UserError where there is no journal and no config that can be read."""
    journal, saved = folder / JOURNAL, folder / "config.json"
    try:
        records = notable(journal.read_bytes()) if journal.is_file() else []
        plain = json.loads(saved.read_bytes()) if saved.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder} can't be read: {error}", "Name a run folder that `lockstep train` made.") from error
    last = {record["kind"]: record for record in records}
    run = last.get("run", {})
    config = plain if isinstance(plain, dict) and plain else group(run, "config")
    if not records and not config:
        raise UserError(
            f"{folder} is no run folder", "Name one that `lockstep train` made; `lockstep runs` lists them."
        )
    end = records[-1] if records and records[-1]["kind"] == "end" else {}
    return Told(folder, config, run, end, last.get("eval", {}))


def compared(one: Told, other: Told) -> dict[str, list[Difference]]:
    """The differences, by what they are of."""
    entries = differences(one.config, other.config)
    free = [entry for entry in entries if entry[0].split(".")[0] in _PLACE]
    return {
        EXPERIMENT: [
            *(entry for entry in entries if entry not in free),
            *_both("data", *(text(group(each.run, "data"), "fingerprint")[:12] for each in (one, other))),
            *_both("parameters", *(_shown(whole(each.run, "parameters")) for each in (one, other))),
        ],
        ORDER: _order(one, other, entries),
        PLACE: [entry for entry in free if entry[0] != "execution.out"],
        ENVIRONMENT: _environment(one.run, other.run),
        RESULT: _result(one, other),
    }


def _order(one: Told, other: Told, entries: Sequence[Difference]) -> list[Difference]:
    """By the ledgers, which are chains over all samples of all steps: only those of as many steps can be compared."""
    steps = [whole(each.end, "steps") for each in (one, other)]
    if steps[0] != steps[1] or None in steps:
        return [entry for entry in entries if entry[0].split(".")[-1] in _ORDER]
    return _both("ledger", *(text(each.end, "ledger_sha256")[:12] for each in (one, other)))


def _environment(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    places = [
        {
            "world": group(run, "world"),
            "devices": _counted(run.get("devices")),
            "threads": _shown(whole(run, "threads")),
            "versions": group(run, "versions"),
        }
        for run in (one, other)
    ]
    return differences(*places)


def _result(one: Told, other: Told) -> list[Difference]:
    sides = []
    for each in (one, other):
        end, scores = each.end, each.evaluated
        top1, loss, seconds = number(scores, "top1"), number(scores, "loss"), number(end, "seconds")
        sides.append(
            {
                "status": text(end, "status") or "no end",
                "steps": _shown(whole(end, "steps")),
                "top-1": _ABSENT if top1 is None else f"{top1:.2%}",
                "loss": _ABSENT if loss is None else f"{loss:.6g}",
                "weights": text(end, "weights_sha256")[:12] or _ABSENT,
                "seconds": _ABSENT if seconds is None else f"{seconds:,.1f}",
            }
        )
    return differences(*sides)


def _both(what: str, one: str, other: str) -> list[Difference]:
    return [(what, one or _ABSENT, other or _ABSENT)] if one != other else []


def _shown(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _counted(devices: Any) -> str:
    """Names of devices, each once, with how many of it there are."""
    names = [name for name in devices if isinstance(name, str)] if isinstance(devices, list) else []
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def written(found: Mapping[str, Sequence[Difference]], names: Sequence[str], width: int | None) -> list[str]:
    """The differences as lines: a table a part, and a sentence for parts without any."""
    lines = ["  ->  ".join(map(printable, names))]
    for part, entries in found.items():
        if not entries:
            lines.append(f"{part}: the same")
            continue
        whats, ones, others = (list(side) for side in zip(*entries, strict=True))
        if width is not None:  # a long value, as a list of notes, must not push the other run's out of sight
            room = max(8, (width - max(map(len, whats)) - 6) // 2)
            ones, others = ([_short(value, room) for value in side] for side in (ones, others))
        grid = [Column(f"{part}:", [f"  {what}" for what in whats], left=True)]
        grid += [Column("", side, left=True) for side in (ones, others)]
        lines += fitted(grid, width)[0]
    return lines


def _short(value: str, room: int) -> str:
    return value if len(value) <= room else f"{value[: room - 1]}\N{HORIZONTAL ELLIPSIS}"
