"""The runs of a report: read from their folders, whatever state these are in."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.commands.report.story import Story, story
from lockstep.commands.report.values import pruned
from lockstep.commands.shared.arguments import train_arguments
from lockstep.config import Config, plain
from lockstep.errors import UserError
from lockstep.inference.mistakes import Mistakes
from lockstep.watch.journal import read, require_plain
from lockstep.watch.outside import group, text

MOST_RUNS = 12  # more lines in a chart can't be told apart


@dataclass
class Told:
    """A run: its name in the report, where it is, what it is, and what happened."""

    name: str
    folder: str
    config: dict[str, Any]  # as config.json has it, or the journal
    command: str  # that repeats it
    command_note: str
    story: Story
    mistakes: Mistakes = field(default_factory=lambda: Mistakes("nobody asked for them (--no-pictures)"))


def runs(folders: Sequence[str]) -> list[Told]:
    """The runs in these folders. Raises UserError where one holds no journal, or where there are too many."""
    if len(folders) > MOST_RUNS:
        raise UserError(f"report of {len(folders)} runs", f"A page takes {MOST_RUNS} at most: name those to compare.")
    names = _names(folders)
    return [_told(name, folder) for name, folder in zip(names, folders, strict=True)]


def _names(folders: Sequence[str]) -> list[str]:
    """The last part of each path, with as many of those before it as tell them apart."""
    parts = [Path(folder).absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(each)} ({place})" for place, each in enumerate(parts, 1)]  # a folder that was named twice


def _told(name: str, folder: str) -> Told:
    path = Path(folder) / "journal.jsonl"
    if not path.exists():
        raise UserError(f"{folder} is no run folder: it has no journal.jsonl", "Name one that `lockstep train` made.")
    damaged: list[int] = []
    records: list[dict[str, Any]] = [pruned(record) for record in read(path, damaged.append)]
    config = _config(Path(folder), records)
    command, note = command_of(config)
    return Told(name, folder, config, command, note, story(records, len(damaged)))


def _config(folder: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """config.json, or where that is missing or damaged what the journal says."""
    path = folder / "config.json"
    require_plain(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    last = next((group(r, "config") for r in reversed(records) if r.get("kind") == "run"), {})
    return dict(pruned(found)) if isinstance(found, dict) and found else last


def command_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """The command that trains so, and what to know of it; empty where this version can't read the config."""
    try:
        whole = Config.from_dict(dict(config))
        words = train_arguments(whole.with_execution(out=""))
    except UserError as error:
        return "", f"This version can't make a command of the run's config: {error.message}"
    data = whole.execution.data_dir
    note = f"It reads its data from {data}." if data else ""
    return shlex.join(["lockstep", *words]), note


def differences(told: Sequence[Told]) -> list[tuple[str, list[str]]]:
    """Entries of the configs that are not the same in all runs: path, and each run's value."""
    first, *others = (each.config for each in told)
    found: dict[str, list[str]] = {}
    for place, config in enumerate(others, 1):
        for path, here, there in plain.differences(first, config):
            found.setdefault(path, [here] * len(told))[place] = there
    return [(path, values) for path, values in found.items() if path != "execution.out"]


def state(told: Told) -> str:
    """In a word or two how the run stands."""
    end = told.story.end
    return text(end, "status") if end is not None else "no end recorded"
