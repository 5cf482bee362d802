"""`lockstep diff`: what differs between two runs, in config, environment, order and result. Imports no torch."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.commands.shared.arguments import parse
from lockstep.commands.shared.grid import Column, fitted, terminal_width
from lockstep.config.fields import differences
from lockstep.errors import UserError, refusal, shown
from lockstep.monitoring.journal import require_plain
from lockstep.monitoring.runs import RunSummary, integer, mapping, number, summarize, text

EXPERIMENT, PLACE, ENVIRONMENT, ORDER, RESULT = "experiment", "where and how", "environment", "order", "result"
_PLACE = ("execution", "recovery", "recipe")  # groups and entries of a config that are no part of the experiment
_ORDER = ("batch_size", "seed", "val_fraction", "fraction", "drop_last", "balance", "aug_repeats", "dataset")
_ABSENT = "(none)"

Difference = tuple[str, str, str]  # of what, the first run's, the other's


@dataclass(frozen=True)
class Comparison:
    """How to print it."""

    strict: bool = False
    """Exit code 1 also where only the results differ."""
    wide: bool = False
    """Whole values, however narrow the terminal is."""
    json: bool = False
    """Print the differences as JSON."""


def main(args: list[str]) -> int:
    """Print what differs between two runs; the exit code is 1 where something of the experiment does."""
    about = (
        "Print what differs between two runs. Exit codes are those of diff: 0 the same experiment, 1 another one (by "
        "config, data or order), 2 something can't be read."
    )
    names, chosen = parse(Comparison(), args, about)
    if len(names) != 2:
        found = f"got {' '.join(names)}" if names else "got none"
        raise UserError(f"diff takes two run folders, {found}", "As `lockstep diff runs/a runs/b`.")
    parts = compared(*(load(Path(name)) for name in names))
    same = not (parts[EXPERIMENT] or parts[ORDER] or (chosen.strict and parts[RESULT]))
    if chosen.json:
        plain = {part: {what: [a, b] for what, a, b in lines} for part, lines in parts.items()}
        print(json.dumps({"runs": names, "same_experiment": same, "differs": plain}, indent=2))
    else:
        print("\n".join(written(parts, names, None if chosen.wide else terminal_width())))
    return 0 if same else 1


def load(folder: Path) -> tuple[RunSummary, dict[str, Any]]:
    """A run and its config. Raises UserError where there is no journal and no config that can be read."""
    run, config = summarize(folder, time.time()) or RunSummary(folder), read_config(folder)
    config = config or run.config
    if not run.newest and not config:
        raise UserError(
            f"{folder} is no run folder", "Name one that `lockstep train` made; `lockstep runs` lists them."
        )
    return run, config


def read_config(folder: Path) -> dict[str, Any]:
    """What a run's config.json holds; empty where there is none. Raises UserError where it can't be read."""
    path = folder / "config.json"
    require_plain(path)
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} can't be read: {refusal(error)}", "Name a run folder that `lockstep train` made."
        ) from error
    return found if isinstance(found, dict) else {}


def compared(
    one: tuple[RunSummary, dict[str, Any]], other: tuple[RunSummary, dict[str, Any]]
) -> dict[str, list[Difference]]:
    """The differences, by what they are of."""
    runs, entries = (one[0], other[0]), differences(one[1], other[1])
    free = [entry for entry in entries if entry[0].split(".")[0] in _PLACE]
    data = [
        {
            "data": text(mapping(run.of("run"), "data"), "fingerprint")[:12] or _ABSENT,
            "parameters": _count(run.of("run"), "parameters"),
            **mapping(run.of("run"), "sources"),
        }
        for run in runs
    ]
    return {
        EXPERIMENT: [*(entry for entry in entries if entry not in free), *differences(*data)],
        ORDER: _order(*runs, entries),
        PLACE: [entry for entry in free if entry[0] != "execution.out"],
        ENVIRONMENT: differences(*(_environment(run.of("run")) for run in runs)),
        RESULT: differences(*map(_result, runs)),
    }


def _order(one: RunSummary, other: RunSummary, entries: Sequence[Difference]) -> list[Difference]:
    """By the ledgers, which are chains over all samples of all steps: only those of as many steps can be compared. The
    config alone does not tell where a journal has been lost."""
    ends = [run.of("end") if run.last.get("kind") == "end" else {} for run in (one, other)]
    steps = [integer(end, "steps") for end in ends]
    if steps[0] != steps[1] or None in steps:
        journals = differences(*({"journal": "read" if run.of("run") else _ABSENT} for run in (one, other)))
        return [*(entry for entry in entries if entry[0].split(".")[-1] in _ORDER), *journals]
    return differences(*({"ledger": text(end, "ledger_sha256")[:12] or _ABSENT} for end in ends))


def _environment(run: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "world": mapping(run, "world"),
        "devices": count_devices(run),
        "threads": _count(run, "threads"),
        "versions": mapping(run, "versions"),
    }


def _result(run: RunSummary) -> dict[str, str]:
    end, scores = run.of("end") if run.last.get("kind") == "end" else {}, run.of("eval")
    top1, loss, seconds = number(scores, "top1"), number(scores, "loss"), number(end, "seconds")
    return {
        "status": text(end, "status") or "no end",
        "steps": _count(end, "steps"),
        "top-1": _ABSENT if top1 is None else f"{top1:.2%}",
        "loss": _ABSENT if loss is None else f"{loss:.6g}",
        "weights": text(end, "weights_sha256")[:12] or _ABSENT,
        "seconds": _ABSENT if seconds is None else f"{seconds:,.1f}",
    }


def _count(record: Mapping[str, Any], name: str) -> str:
    value = integer(record, name)
    return _ABSENT if value is None else f"{value:,}"


def count_devices(run: Mapping[str, Any]) -> str:
    """The names of devices in a `run` record, each once, with how many of it there are."""
    devices = run.get("devices")
    names = [name for name in devices if isinstance(name, str)] if isinstance(devices, list) else []
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def written(parts: Mapping[str, Sequence[Difference]], names: Sequence[str], width: int | None) -> list[str]:
    """The differences as lines: a table a part, and a sentence for parts without any."""
    lines = ["  ->  ".join(map(shown, names))]
    for part, entries in parts.items():
        if not entries:
            lines.append(f"{part}: the same")
            continue
        whats, ones, others = (list(side) for side in zip(*entries, strict=True))
        if width is not None:  # a long value, as a list of notes, must not push the other run's out of sight
            room = max(8, (width - max(map(len, whats)) - 6) // 2)
            ones, others = ([_short(value, room) for value in side] for side in (ones, others))
        columns = [Column(f"{part}:", [f"  {what}" for what in whats], left=True)]
        columns += [Column("", side, left=True) for side in (ones, others)]
        lines += fitted(columns, width)[0]
    return lines


def _short(value: str, room: int) -> str:
    return value if len(value) <= room else f"{value[: room - 1]}\N{HORIZONTAL ELLIPSIS}"
