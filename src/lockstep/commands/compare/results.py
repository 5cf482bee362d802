"""The rounds of every row brought together: medians, intervals, speed-ups, and whether the comparison was fair."""

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.commands.shared.measured import AGAIN, BUSY, beyond, cpu_name, interval

FIGURES = (
    "seconds_per_epoch", "total_s", "images_per_s", "speedup", "efficiency", "data_wait", "communication",
    "memory_sum_gib", "memory_largest_gib", "memory_smallest_gib", "top1",
)  # fmt: skip
_ONE_WINDOW = "figures of the step not measured: the run has one log window, which is the warm-up; see --log-every"


@dataclass
class Row:
    """A row of the table before its figures are known."""

    name: str
    strategy: str
    processes: int
    devices: int  # GPUs that it drives, or processes
    threads: int = 0
    workers: int = 0
    command: str = ""  # gives this row's run again
    not_measured: str = ""
    rounds: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by number of the round: cells.measure's result


def figure(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Median and interval of the rounds; no interval from a single one, None where a round lacks the figure."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    low, high = interval(known) if len(known) > 1 else (None, None)
    return {"median": statistics.median(known), "low": low, "high": high}


def aggregate(rows: Sequence[Row], baseline: str) -> dict[str, Any]:
    """Rows with their figures, the notes that they refer to, and the ledger digests that were seen.

    A speed-up is the baseline's seconds of training for an epoch over the row's, of the same round: what the machine
    does to a whole round falls out. Efficiency is the speed-up over the ratio of the devices.
    """
    base = next(row for row in rows if row.name == baseline)
    notes: list[str] = []
    table = [_row(row, base, notes) for row in rows]
    ledgers: dict[str, list[str]] = {}
    for row in rows:
        for result in row.rounds.values():
            names = ledgers.setdefault(result["ledger_sha256"], [])
            names += [] if row.name in names else [row.name]
    return {"baseline": baseline, "rows": table, "notes": notes, "ledgers": ledgers, "fair": len(ledgers) <= 1}


def _row(row: Row, base: Row, notes: list[str]) -> dict[str, Any]:
    plain = {name: value for name, value in vars(row).items() if name != "rounds"}
    rounds = {} if row.not_measured else dict(sorted(row.rounds.items()))
    columns: dict[str, list[float | None]] = {name: [r.get(name) for r in rounds.values()] for name in FIGURES}
    pairs = [(base.rounds[k], rounds[k]) for k in rounds if k in base.rounds and not base.not_measured]
    columns["speedup"] = [_ratio(b["seconds_per_epoch"], r["seconds_per_epoch"]) for b, r in pairs]
    columns["efficiency"] = [_ratio(value, row.devices / base.devices) for value in columns["speedup"]]
    figures = {name: figure(values) for name, values in columns.items()}
    plain["memory_gib"] = _each([r.get("memory_gib") or [] for r in rounds.values()])
    note = f"not measured: {row.not_measured}" if row.not_measured else ""
    if not note and rounds and figures["seconds_per_epoch"] is None:
        note = _ONE_WINDOW
    others = statistics.median([r.get("others_cores") or 0.0 for r in rounds.values()] or [0.0])
    if not note and (note := _beyond(row, base, figures["speedup"])):
        figures["speedup"] = figures["efficiency"] = None
    elif not note and others > BUSY:
        note = f"others kept {others:.1f} cores busy meanwhile: {AGAIN}"
    if note and note not in notes:
        notes.append(note)
    return plain | {"repeats": len(rounds), "others_cores": others, "note": _number(note, notes)} | figures


def _number(note: str, notes: list[str]) -> int | None:
    return notes.index(note) + 1 if note else None


def _beyond(row: Row, base: Row, speedup: dict[str, float | None] | None) -> str:
    """Why its speed-up is not believed, where it trains in the way that is the baseline's too; or ""."""
    same = row.strategy.partition("+")[2] == base.strategy.partition("+")[2]
    median = speedup["median"] if speedup is not None else None
    return beyond(median, row.devices / base.devices) if same and median is not None else ""


def _each(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The median over the rounds for each process or device; nothing where a round has another number of them."""
    if len({len(each) for each in rounds}) != 1:
        return []
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under


def environment(cores: int, device: str, devices: int) -> dict[str, Any]:
    """Where figures were taken: processor, cores, devices, versions; no name or path of the machine."""
    from lockstep.training.summary import versions

    system = f"{platform.system()} {platform.machine()}"
    return {"cpu": cpu_name(), "cores": cores, "device": device, "devices": devices, "system": system, **versions()}
