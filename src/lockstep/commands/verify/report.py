"""What `lockstep verify` found: as JSON, and as it is printed."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.commands.verify.agreement import REPORTED, Comparison
from lockstep.commands.verify.causes import FLOAT64, Cause
from lockstep.commands.verify.diagnose import Diagnosis
from lockstep.commands.verify.plan import Plan
from lockstep.commands.verify.rows import Row
from lockstep.commands.verify.trace import Trace
from lockstep.processes.devices import device_type

_COLOURS = {"equal": "green", "within tolerance": "yellow", "different": "red", "none": "dim"}
_COLUMN, _MARGIN = 34, 18  # characters


@dataclass(frozen=True)
class Report:
    """What verify found."""

    plan: Plan
    base: Trace
    comparisons: list[Comparison]
    found: Diagnosis

    @property
    def causes(self) -> Mapping[int, list[Cause]]:
        """By number of processes."""
        return self.found.causes

    @property
    def holds(self) -> bool:
        """True where the mode's claim holds: the same bits in exact mode, the same but for rounding in plain mode."""
        return all(self.harmless(cause) for causes in self.causes.values() for cause in causes)

    def harmless(self, cause: Cause) -> bool:
        """True for what the mode does not rule out."""
        return not self.plan.config.exact and cause.suspects == (FLOAT64,)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the config, each row of each comparison, the causes."""
        plan, base = self.plan, self.base
        return {
            "holds": self.holds,
            "config": plan.config_for(base.processes).to_dict(),
            "steps": len(base.loss),
            "device": device_type(plan.config.execution),
            "threads": plan.threads,
            "tolerance_per_step": plan.per_step,
            "float64": {str(n): largest for n, largest in self.found.float64.items()},
            "base": _result(base),
            "compared": [_result(c.other) | {"rows": [asdict(row) for row in c.rows]} for c in self.comparisons],
            "causes": [
                {"processes": n, **asdict(cause), "remedy": cause.remedy(plan.config), "harmless": self.harmless(cause)}
                for n, causes in self.causes.items()
                for cause in causes
            ],
        }


def _result(trace: Trace) -> dict[str, Any]:
    written = {"weights_sha256": trace.weights_sha256, "file_sha256": trace.file_sha256}
    return {"processes": trace.processes, **written, "evaluation": trace.metrics}


def print_report(report: Report) -> None:
    """Print the table, the reasons and the verdict."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _MARGIN + _COLUMN * len(report.comparisons))
    plan, config, steps = report.plan, report.plan.config, len(report.base.loss)
    mode = f"exact mode ({config.exact} slices)" if config.exact else "plain mode"
    console.print(
        f"{config.recipe}: {config.model.model} on {config.data.dataset}, {mode}, {config.precision}, "
        f"{device_type(config.execution)}, {steps} steps of {config.batch_size}, {plan.threads} thread(s) per process"
        + (f", patched by {plan.patch}" if plan.patch else "")
    )
    if steps < plan.steps:
        console.print(f"(--steps {plan.steps}: the run has {steps})")
    table = Table("", *(f"N = {c.other.processes} against {report.base.processes}" for c in report.comparisons))
    for rows in zip(*(c.rows for c in report.comparisons), strict=True):
        table.add_row(rows[0].quantity, *map(_cell, rows))
    console.print(table, soft_wrap=False)
    console.print(_foot(report), style="dim")
    for n, causes in sorted(report.causes.items()):
        for cause in causes:
            differs = f"N = {n} differs" if n != report.base.processes else f"N = {n}"
            harmless = " (rounding: plain mode's claim holds)" if report.harmless(cause) else ""
            console.print(f"{differs}: {cause.name}{harmless}", style="bold")
            console.print(f"  {cause.finding}\n  {cause.remedy(config)}")
    console.print(_verdict(report), style="bold green" if report.holds else "bold red")


def _cell(row: Row) -> Text:
    text = Text(row.verdict, style=_COLOURS[row.verdict])
    return text.append(f"\n{row.detail}", style="default") if row.detail else text


def _foot(report: Report) -> str:
    against = "Differences are relative to the largest magnitude of a tensor or trajectory."
    if report.plan.config.exact:
        return f"{against} Asked for: the same bits (loss and gradient norm, added up for this table: {REPORTED:g})."
    each, end = report.plan.per_step, report.plan.per_step * len(report.base.loss)
    return (
        f"{against} Tolerance: {each:g} for each step taken, {end:.1e} at the end. Rounding is what float64 takes away."
    )


def _verdict(report: Report) -> str:
    counts = ", ".join(map(str, report.plan.nproc))
    claim = "the same bits" if report.plan.config.exact else "the same but for rounding"
    if not report.holds:
        return f"does not hold: {claim} on N = {counts}"
    top1 = (report.base.metrics or {}).get("top1", math.nan)
    end = f"top-1 {top1:.2%} after {len(report.base.loss)} steps"
    if report.plan.config.exact:
        return f"holds: {claim} on N = {counts} ({end}; weights_sha256 {report.base.weights_sha256})"
    unseen = [c for c in report.comparisons if not c.equal and c.other.processes not in report.found.float64]
    if unseen:
        why = report.found.note or "--no-float64"
        return f"within tolerance on N = {counts} ({end}); whether that is rounding was not seen: {why}"
    largest = max(report.found.float64.values(), default=0.0)
    return f"holds: {claim} on N = {counts} ({end}; in float64 {largest:.1e} at most)"
