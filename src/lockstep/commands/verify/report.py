"""What `lockstep verify` prints."""

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.commands.verify.agreement import REPORTED, Row
from lockstep.commands.verify.run import Report

_COLOURS = {"equal": "green", "within tolerance": "yellow", "different": "red", "none": "dim"}
_COLUMN, _MARGIN = 34, 18  # characters


def show(report: Report, console: Console | None = None) -> None:
    """The table, the reasons and the verdict."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _MARGIN + _COLUMN * len(report.comparisons))
    plan, base = report.plan, report.base
    config = plan.config
    mode = f"exact mode ({config.exact} slices)" if config.exact else "plain mode"
    console.print(
        f"{config.recipe}: {config.model.model} on {config.data.dataset}, {mode}, {config.precision}, {report.device}, "
        f"{len(base.loss)} steps of {config.batch_size}, {report.threads} thread(s) per process"
        + (f", patched by {plan.patch}" if plan.patch else ""),
        markup=False,
        soft_wrap=True,
    )
    if len(base.loss) < plan.steps:
        console.print(f"(--steps {plan.steps}: the run has {len(base.loss)})", markup=False)
    table = Table("", *(f"N = {c.other.processes} against {base.processes}" for c in report.comparisons))
    for rows in zip(*(c.rows for c in report.comparisons), strict=True):
        table.add_row(rows[0].quantity, *map(_cell, rows))
    console.print(table)
    console.print(_foot(report), markup=False, soft_wrap=True, style="dim")
    for n, causes in sorted(report.causes.items()):
        for cause in causes:
            differs = f"N = {n} differs" if any(c.other.processes == n for c in report.comparisons) else f"N = {n}"
            harmless = " (rounding: plain mode's claim holds)" if report.harmless(cause) else ""
            console.print(f"{differs}: {cause.name}{harmless}", markup=False, style="bold", soft_wrap=True)
            console.print(f"  {cause.finding}\n  {cause.remedy}", markup=False, soft_wrap=True)
    console.print(_verdict(report), markup=False, soft_wrap=True, style="bold green" if report.holds else "bold red")


def _cell(row: Row) -> Text:
    text = Text(row.verdict, style=_COLOURS[row.verdict])
    return text.append(f"\n{row.detail}", style="default") if row.detail else text


def _foot(report: Report) -> str:
    against = "Differences are relative to the largest magnitude of a tensor or trajectory."
    if report.plan.config.exact:
        return f"{against} Asked for: the same bits (loss and gradient norm, added up for this table: {REPORTED:g})."
    end = report.per_step * len(report.base.loss)
    return (
        f"{against} Tolerance: {report.per_step:g} for each step taken, {end:.1e} at the end; more is rounding where "
        f"float64 takes it away."
    )


def _verdict(report: Report) -> str:
    counts = ", ".join(map(str, report.plan.nproc))
    claim = "the same bits" if report.plan.config.exact else "the same but for rounding"
    if not report.holds:
        return f"does not hold: {claim} on N = {counts}"
    top1 = (report.base.metrics or {}).get("top1", math.nan)
    same = f"; weights_sha256 {report.base.weights_sha256}" if report.plan.config.exact else ""
    return f"holds: {claim} on N = {counts} (top-1 {top1:.2%} after {len(report.base.loss)} steps{same})"
