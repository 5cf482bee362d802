"""A sweep's table: a setting a row, means over seeds, and paired differences, each with its interval."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# the 97.5 % quantiles of Student's t distribution by degrees of freedom, 1 to 30; beyond them the normal's is near
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and its 95 % interval by Student's t; of a single value there is none: NaN, NaN."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a setting: its seeds, final and best values, and the difference to the first setting, seed by seed.

    Runs of one seed begin with the same weights and draw alike, so what seeds have in common falls out of it.
    """
    settings: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        runs = settings.setdefault(row["setting"], {})
        if not row["failed"] and row["final"] is not None:
            runs[row["seed"]] = row
    first = next(iter(settings.values()), {})
    out = []
    for number, (setting, runs) in enumerate(settings.items()):
        pairs = [(runs[seed]["final"] - first[seed]["final"]) for seed in runs if seed in first] if number else []
        same = all(runs[seed]["ledger_sha256"] == first[seed]["ledger_sha256"] for seed in runs if seed in first)
        out.append(
            {
                "setting": setting,
                "seeds": sorted(runs),
                "failed": sum(row["setting"] == setting and bool(row["failed"]) for row in rows),
                "final": _described([run["final"] for run in runs.values()]),
                "best": _described([run["best"] for run in runs.values()]),
                "difference": _described(pairs),
                "same_samples": same,
            }
        )
    return out


def _described(values: Sequence[float]) -> dict[str, float | None] | None:
    if not values:
        return None
    mean, low, high = interval(values)
    return {"mean": mean, "low": None if math.isnan(low) else low, "high": None if math.isnan(high) else high}


def _written(found: Mapping[str, Any] | None, percent: bool, sign: str = "") -> str:
    """`97.21 [96.80, 97.62]`; `97.21` of one seed, and a dash where there is nothing."""
    if found is None:
        return "\N{EN DASH}"
    factor, places = (100, 2) if percent else (1, 4)
    text = f"{found['mean'] * factor:{sign}.{places}f}"
    if found["low"] is None:
        return text
    return f"{text} [{found['low'] * factor:{sign}.{places}f}, {found['high'] * factor:{sign}.{places}f}]"


def cells(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows."""
    metric = results["metric"]
    percent = metric != "loss"
    unit = f"{metric}, %" if percent else metric
    heads = ["setting", "seeds", f"last {unit}", "difference to the first", f"best {unit}"]
    rows = [
        [
            row["setting"] or "as it is",
            str(len(row["seeds"])) + (f" ({row['failed']} failed)" if row["failed"] else ""),
            _written(row["final"], percent),
            _written(row["difference"], percent, "+") + ("" if row["same_samples"] else " *"),
            _written(row["best"], percent),
        ]
        for row in results["settings"]
    ]
    return heads, rows


def explanations(results: Mapping[str, Any]) -> list[str]:
    """What stands under the table."""
    lines = [
        "Means over seeds, 95 % intervals (Student's t). Differences are paired: runs of one seed share every draw."
    ]
    if all(len(row["seeds"]) < 2 for row in results["settings"]):
        lines = ["One seed a setting: no intervals. Give several, as --vary seed=0,1,2."]
    if not all(row["same_samples"] for row in results["settings"]):
        lines.append("* in other batches than the first: the pairs share their seed, and not each step's samples.")
    return lines


def markdown(results: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    heads, rows = cells(results)
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *explanations(results), ""])


def show(results: Mapping[str, Any]) -> None:
    """The table on a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 160)
    heads, rows = cells(results)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        grid.add_column(head, justify="right" if number else "left")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
    for line in explanations(results):
        console.print(line, markup=False, soft_wrap=True)
