"""What `lockstep forecast` found: as JSON, and as it is printed."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.commands.forecast.measure import Measured
from lockstep.commands.forecast.model import Forecast, Limits, Link
from lockstep.commands.forecast.plan import Group, Layout, Plan
from lockstep.commands.shared.measured import AGAIN, BUSY, beyond
from lockstep.processes.devices import device_type
from lockstep.processes.files import write_error, write_json

_COLUMNS = ("N", "step ms", "images/s", "speed-up", "efficiency", "compute ms", "all-reduce ms", "hidden", "bottleneck")


@dataclass(frozen=True)
class Report:
    """What forecast found."""

    plan: Plan
    cores: int
    link: Link
    measured: dict[Group, Measured]
    one: Forecast  # the step of one process
    rows: list[tuple[Layout, Forecast]]  # for --nproc
    limits: Limits

    @property
    def largest(self) -> Measured:
        """What was measured for the largest N."""
        return self.measured[self.rows[-1][0].group]

    def row(self, where: Layout, forecast: Forecast) -> dict[str, Any]:
        """All of one N: the step, its parts, and what they come to."""
        speedup = self.one.step_s / forecast.step_s
        doubt = beyond(speedup, forecast.processes)
        rates, piece = self.measured[where.group].loader, self.plan.piece(where.processes)
        nearest = min(rates, key=lambda size: abs(size - piece))
        return asdict(forecast) | {
            "step_s": forecast.step_s,
            "images_per_s": self.plan.config.batch_size / forecast.step_s,
            "speedup": None if doubt else speedup,
            "efficiency": None if doubt else speedup / forecast.processes,
            "note": doubt,
            "hidden": forecast.hidden,
            "bottleneck": forecast.bottleneck,
            "threads": where.group.threads,
            "loader_images_per_s": where.processes * rates[nearest] / where.crowding,  # of all processes
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what was measured, and each row."""
        link = asdict(self.link) | {"bandwidth_mbit": self.link.bandwidth * 8 / 1e6}
        buckets = self.largest.sends.buckets
        return {
            "config": self.plan.config.to_dict(),
            "device": device_type(self.plan.config.execution),
            "cores": self.cores,
            "link": {k: None if v == math.inf else v for k, v in link.items()},
            "bytes_per_step": sum(buckets),
            "buckets": buckets,
            "measured": [
                {
                    "threads": group.threads,
                    "at_once": group.together,
                    "reduces": group.reduces,
                    "fixed_s": found.curve.line[0],
                    "s_per_image": found.curve.line[1],
                    "steps": {str(size): asdict(step) for size, step in found.curve.points.items()},
                    "loader_images_per_s": {str(size): rate for size, rate in found.loader.items()},
                    "all_reduces": found.probes,
                    "others_cores": found.others_cores,
                }
                for group, found in self.measured.items()
            ],
            "rows": [self.row(*row) for row in self.rows],
            "limits": asdict(self.limits),
        }


def write(report: Report, out: str) -> Path:
    """Keep the report: `out` is a file that ends in .json, or a folder that gets forecast.json."""
    path = Path(out) if out.endswith(".json") else Path(out) / "forecast.json"
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error
    write_json(path, report.to_dict())
    return path


def print_report(report: Report) -> None:
    """Print what was measured, the table and the verdict."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, 110)
    console.print("\n".join([*_measured(report), f"interconnect: {describe(report.link)}"]))
    table = Table()
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "bottleneck" else "right")
    for where, forecast in report.rows:
        row, several = report.row(where, forecast), forecast.processes > 1
        table.add_row(
            str(forecast.processes),
            f"{forecast.step_s * 1e3:.1f}",
            f"{row['images_per_s']:,.0f}",
            "-" if row["note"] else f"{row['speedup']:.2f}",
            "-" if row["note"] else f"{row['efficiency']:.0%}",
            f"{(forecast.compute_s + forecast.cores_s) * 1e3:.1f}",
            f"{forecast.all_reduce_s * 1e3:.1f}" if several else "-",
            f"{forecast.hidden:.0%}" if several else "-",
            forecast.bottleneck + (f" ({where.crowding:g} threads a core)" if where.crowding > 1 else ""),
        )
    console.print(table, soft_wrap=False)
    for line in _doubts(report):
        console.print(line)
    console.print(_verdict(report), style="bold")


def _measured(report: Report) -> list[str]:
    config, buckets = report.plan.config, report.largest.sends.buckets
    lines = [
        f"{config.recipe}: {config.model.model} on {config.data.dataset}, batch {config.batch_size}, "
        f"{config.precision}, {device_type(config.execution)}"
    ]
    for group, found in report.measured.items():
        (fixed, each), rate = found.curve.line, max(found.loader.values())
        lines.append(
            f"{group.name}: a step takes {fixed * 1e3:.2f} ms + "
            f"{each * 1e3:.3f} ms for each image of a micro-batch; a loader delivers {rate:,.0f} images/s"
        )
    if buckets:
        sizes = " + ".join(f"{nbytes / 1e6:.2f}" for nbytes in buckets)
        lines.append(f"gradients: {sum(buckets) / 1e6:.2f} MB a step in {len(buckets)} bucket(s): {sizes}")
    return lines


def _doubts(report: Report) -> list[str]:
    """What of the figures is not to be believed, in sentences."""
    others = max(found.others_cores for found in report.measured.values())
    rows = (report.row(*row) for row in report.rows)
    told = [f"N = {row['processes']}: {row['note']}" for row in rows if row["note"]]
    return [*told, *([f"others kept {others:.1f} cores busy meanwhile: {AGAIN}"] if others > BUSY else [])]


def describe(link: Link) -> str:
    """A link as a sentence."""
    rate = "no limit seen" if link.bandwidth == math.inf else f"{link.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    fitted = f", fitted within {link.error:.0%}" if link.error else ""
    return (
        f"{link.name}: latency {link.alpha_s * 1e6:.0f} us, {rate}{fitted}; "
        f"{link.stolen_core_s * 1e9:.2f} core-ms for each MB sent beside the computation"
    )


def _verdict(report: Report) -> str:
    """One sentence: the bottleneck, and where it stops scaling."""
    last, found = report.rows[-1][1], report.limits
    up_to = f"up to the {found.looked_at} processes looked at"
    half = f"efficiency falls below 50 % at N = {found.half}" if found.half else f"efficiency stays above 50 % {up_to}"
    if found.fastest < found.looked_at:
        end = f"the step is shortest with N = {found.fastest}: more processes are no faster"
    else:
        end = f"each further process is a gain {up_to}"
    return f"At N = {last.processes} the bottleneck is {last.bottleneck}; {half}, and {end}."
