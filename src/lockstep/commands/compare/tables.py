"""The results as text: the same for the terminal, Markdown and the page; CSV and JSON hold the numbers."""

import csv
import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.commands.compare.results import FIGURES

_WIDTH = 200  # characters, of which the whole table takes less
_FILE_WIDTH = 100  # where there is no terminal, and no $COLUMNS
_ENOUGH = 6  # rounds, for 95 %
_SPARE = (
    "memory_smallest_gib", "memory_largest_gib", "threads", "data_wait", "memory_sum_gib", "images_per_s", "total_s",
    "communication", "efficiency",
)  # fmt: skip
_THREE = -1
NOTHING = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """A column: the entry of a row that it shows, its heading, and how a measured number is written."""

    key: str
    title: str
    decimals: int | None = None  # of the median and its interval; _THREE: three digits in all; None: not measured
    percent: bool = False

    def write(self, found: Mapping[str, float | None]) -> str:
        """`1.95 [1.90, 2.01]`; `1.95` where there is no interval."""
        values = [value * (100 if self.percent else 1) for value in found.values() if value is not None]
        places = _three(values[0]) if self.decimals == _THREE else self.decimals
        middle, *ends = (f"{value:,.{places}f}" for value in values)
        return (
            middle + (" %" if self.percent else "") + (f" [{', '.join(ends)}]" if found["low"] != found["high"] else "")
        )


def _three(value: float) -> int:
    """Decimals that show three digits."""
    return min(5, max(0, 2 - math.floor(math.log10(value)))) if value > 0 else 2


def columns(results: Mapping[str, Any]) -> list[Column]:
    """The columns of the table, in order."""
    epochs = results["config"]["epochs"]
    return [
        Column("name", "strategy"),
        Column("threads", "threads each"),
        Column("seconds_per_epoch", "s/epoch", _THREE),
        Column("total_s", f"s for {epochs} epoch{'s' if epochs > 1 else ''}", _THREE),
        Column("images_per_s", "images/s", _THREE),
        Column("speedup", "speed-up", 2),
        Column("efficiency", "efficiency", 1, percent=True),
        Column("data_wait", "data wait", 1, percent=True),
        Column("communication", "communication", 1, percent=True),
        Column("memory_sum_gib", "memory, GiB", _THREE),
        Column("memory_largest_gib", "largest, GiB", _THREE),
        Column("memory_smallest_gib", "smallest, GiB", _THREE),
        Column("top1", "top-1", 2, percent=True),
    ]


def text(column: Column, row: Mapping[str, Any]) -> str:
    """What stands in a column of a row: `1.95 [1.90, 2.01]`, or `1.95` from a single round."""
    value = row[column.key]
    if column.decimals is None:
        noted = column.key == "name" and row["note"] is not None and row["seconds_per_epoch"] is not None
        return f"{value} [{row['note']}]" if noted else str(value)
    if value is not None:
        return column.write(value)
    first = column.key == "seconds_per_epoch" and row["note"] is not None
    return f"not measured [{row['note']}]" if first else NOTHING


def heading(results: Mapping[str, Any]) -> str:
    """What was compared, on what."""
    config, place = results["config"], results["environment"]
    device = place["device"] if place["device"] != "cpu" else place["cpu"]
    part = config["data"]["fraction"]
    return (
        f"{config['recipe']}: {config['model']['model']} on {f'{part:.3g} of ' if part < 1 else ''}"
        f"{config['data']['dataset']}, batch {config['batch_size']}, "
        f"{config['epochs']} epoch(s), seed {config['seed']}; {place['cores']} cores, {device}, torch {place['torch']}"
    )


def explanations(results: Mapping[str, Any]) -> list[str]:
    """Lines under the table: how to read it, the notes by number, and whether the rows may be compared at all."""
    rounds = results["repeats"]
    how = (
        f"median of {rounds} interleaved rounds [95 % bootstrap interval]" if rounds > 1 else "one round: no intervals"
    )
    lines = [f"Speed-up and efficiency against {results['baseline']}; {how}."]
    if 1 < rounds < _ENOUGH:  # the median lies outside all of n values with probability 2^(1 - n)
        lines.append(
            f"{rounds} rounds: no interval of a median can hold it with more than {1 - 2 ** (1 - rounds):.0%}."
        )
    if results["environment"]["device"] == "cpu" and results["threads_each"] == 0:
        lines.append(
            f"All rows share {results['environment']['cores']} CPU threads, so more processes add no hardware: "
            "an efficiency of 1 / processes is as good as the baseline."
        )
    for row in results["rows"]:
        if len(memory := row["memory_gib"]) > row["processes"]:  # one process that drives several devices
            each = ", ".join(f"{gib:,.{_three(gib)}f}" for gib in memory)
            times = f"; the most is {max(memory) / min(memory):.2g} times the least" if min(memory) else ""
            first = ", and the first also holds optimizer, outputs and loss" if _copies(row) else ""
            lines.append(f"{row['name']}: {each} GiB on its devices{times}{first}.")
    lines += [f"[{number}] {note}" for number, note in enumerate(results["notes"], 1)]
    if not results["fair"]:
        lines.append("NOT COMPARABLE: the rows did not train on the same samples in the same order.")
        lines += [f"  ledger {digest[:12]}: {', '.join(names)}" for digest, names in results["ledgers"].items()]
    elif ledger := "".join(results["ledgers"]):
        lines.append(f"All rows trained on the same samples in the same order: ledger {ledger[:12]}.")
    return lines


def _copies(row: Mapping[str, Any]) -> bool:
    """True for DataParallel, which copies the model to all devices in every step."""
    return str(row["strategy"]).partition("+")[0] == "dp"


def show(results: Mapping[str, Any], console: Console | None = None) -> None:
    """The table on a terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = _FILE_WIDTH
    visible, left_out = columns(results), 0
    free = console.options.update(width=_WIDTH)
    while console.measure(_grid(results, visible), options=free).maximum > console.width and left_out < len(_SPARE):
        visible = [column for column in visible if column.key != _SPARE[left_out]]
        left_out += 1
    console.print(heading(results), markup=False, soft_wrap=True)
    console.print(_grid(results, visible))
    if left_out:
        line = f"({console.width} characters are too narrow for all columns: the files have them)"
        console.print(line, soft_wrap=True)
    for line in explanations(results):
        console.print(line, markup=False, soft_wrap=True)


def _grid(results: Mapping[str, Any], visible: list[Column]) -> Table:
    """Intervals stand under their median."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in visible:
        justify: Literal["left", "right"] = "left" if column.key == "name" else "right"
        grid.add_column("\n".join(column.title.rsplit(" ", 1)), justify=justify, vertical="top", overflow="fold")
    for row in results["rows"]:
        grid.add_row(*(Text(text(column, row).replace(" [", "\n[")) for column in visible))
    return grid


def markdown(results: Mapping[str, Any]) -> str:
    """The table, with what stands under it."""
    visible = columns(results)
    lines = [
        "| " + " | ".join(column.title for column in visible) + " |",
        "| " + " | ".join("---" if column.key == "name" else "---:" for column in visible) + " |",
        *("| " + " | ".join(text(column, row) for column in visible) + " |" for row in results["rows"]),
    ]
    return "\n".join([heading(results), "", *lines, "", *(f"- {line}" for line in explanations(results)), ""])


def as_csv(results: Mapping[str, Any]) -> str:
    """One line a row; each figure as median, low and high, empty where there is none."""
    plain = ("name", "strategy", "processes", "devices", "threads", "workers", "repeats", "not_measured")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*plain, *(title for name in FIGURES for title in (name, f"{name}_low", f"{name}_high"))])
    for row in results["rows"]:
        figures = (row[name] or {} for name in FIGURES)
        numbers = (found.get(part) for found in figures for part in ("median", "low", "high"))
        writer.writerow([*(row[name] for name in plain), *("" if n is None else n for n in numbers)])
    return out.getvalue()
