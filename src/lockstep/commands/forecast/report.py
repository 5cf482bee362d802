"""What `lockstep forecast` prints."""

import math

from rich.console import Console
from rich.table import Table

from lockstep.commands.forecast.model import Curve, Link
from lockstep.commands.forecast.run import Report, write

_COLUMNS = ("N", "step ms", "images/s", "speed-up", "efficiency", "compute ms", "all-reduce ms", "hidden", "bottleneck")


def tell(report: Report | None) -> None:
    """Print a report and keep it where --out says; None is a machine that only took part."""
    if report is None:
        print("took part; machine 0 has the forecast")
        return
    show(report)
    if out := report.plan.config.execution.out:
        print(f"written to {write(report, out)}")


def show(report: Report, console: Console | None = None) -> None:
    """What was measured, the table and the verdict."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 110)
    for line in (*_measured(report), f"interconnect: {describe(report.link)}"):
        console.print(line, markup=False, soft_wrap=True)
    table = Table()
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "bottleneck" else "right")
    for where, p in report.shown:
        waits = f"{p.all_reduce_s * 1e3:.1f}" if p.processes > 1 else "-"
        table.add_row(
            str(p.processes),
            f"{p.step_s * 1e3:.1f}",
            f"{report.plan.config.batch_size / p.step_s:,.0f}",
            f"{report.speedup(p):.2f}",
            f"{report.speedup(p) / p.processes:.0%}",
            f"{(p.compute_s + p.cores_s) * 1e3:.1f}",
            waits,
            f"{p.hidden:.0%}" if p.processes > 1 else "-",
            p.bottleneck + (f" ({where.crowding:g} threads a core)" if where.crowding > 1 else ""),
        )
    console.print(table)
    console.print(verdict(report), markup=False, soft_wrap=True, style="bold")


def _measured(report: Report) -> list[str]:
    config, sends = report.plan.config, report.sends
    lines = [
        f"{config.recipe}: {config.model.model} on {config.data.dataset}, batch {config.batch_size}, "
        f"{config.precision}, {report.device}"
    ]
    for (threads, together, _), found in report.measured.items():
        fixed, each = Curve(found.steps).line
        rate = max(found.loader.values())
        lines.append(
            f"{together} process(es) of {threads} thread(s): a step takes {fixed * 1e3:.2f} ms + {each * 1e3:.3f} ms "
            f"for each image of a micro-batch; a loader delivers {rate:,.0f} images/s"
        )
    if sends.buckets:
        sizes = " + ".join(f"{nbytes / 1e6:.2f}" for nbytes in sends.buckets)
        lines.append(f"gradients: {sum(sends.buckets) / 1e6:.2f} MB a step in {len(sends.buckets)} bucket(s): {sizes}")
    return lines


def describe(link: Link) -> str:
    """A link in words."""
    rate = "no limit seen" if link.bandwidth == math.inf else f"{link.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    fitted = f", fitted within {link.error:.0%}" if link.error else ""
    return (
        f"{link.name}: latency {link.alpha_s * 1e6:.0f} us, {rate}{fitted}; "
        f"{link.stolen_core_s * 1e9:.2f} core-ms for each MB sent beside the computation"
    )


def verdict(report: Report) -> str:
    """One sentence: the bottleneck, and where it stops scaling."""
    _, last = report.shown[-1]
    found = report.limits
    up_to = f"up to the {found.looked_at} processes looked at"
    half = f"efficiency falls below 50 % at N = {found.half}" if found.half else f"efficiency stays above 50 % {up_to}"
    if found.fastest < found.looked_at:
        end = f"the step is shortest with N = {found.fastest}: more processes are no faster"
    else:
        end = f"each further process is a gain {up_to}"
    return f"At N = {last.processes} the bottleneck is {last.bottleneck}; {half}, and {end}."
