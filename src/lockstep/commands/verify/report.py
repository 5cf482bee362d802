"""What `lockstep verify` found, and how it is printed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.commands.verify import compare
from lockstep.commands.verify.compare import REPORTED, Comparison
from lockstep.commands.verify.plan import Plan, Variant
from lockstep.commands.verify.trace import Trace
from lockstep.distributed.devices import device_type
from lockstep.distributed.failures import WorkerFailed
from lockstep.errors import UserError

_COLOURS = {"equal": "green", "within tolerance": "yellow", "different": "red", "none": "dim"}
_COLUMN, _MARGIN = 34, 18  # characters
_THINGS = {
    "nproc": "the number of processes", "threads": "the number of CPU threads", "workers": "the number of workers",
    "hash_seed": "how texts hash (the order of a set)", "reordered": "the order in which folders are listed",
}  # fmt: skip


@dataclass
class Row:
    """A run beside the first."""

    variant: Variant
    comparison: Comparison
    wide: Comparison | None = None  # in float64, as far as that was run

    def holds(self, bound: float) -> bool:
        """True where the mode's claim holds: the same bits, or the same but for rounding."""
        if self.wide is None:
            return self.comparison.holds
        # what is finite on one side alone, or no number, is no rounding
        seen = math.isfinite(self.comparison.largest) and self.wide.row("evaluation").holds
        return seen and self.wide.largest <= bound

    @property
    def reason(self) -> str:
        """What differs first; a fault may hide below the tolerance, and not in float64."""
        return self.comparison.reason or (self.wide.reason if self.wide is not None else "")


@dataclass
class Report:
    """What verify found."""

    plan: Plan
    base: Variant
    first: Trace
    rows: list[Row]
    unseen: str = ""  # why nothing was run in float64
    again: Trace | None = None  # the first run once more, with each step compared with itself
    itself: str = ""  # what differs first there

    @property
    def law(self) -> list[str]:
        """What the runs' self-checks said: of sentences that differ in size or step alone, the first."""
        traces = [*([] if self.again is None else [self.again]), self.first]
        traces += [row.comparison.other for row in self.rows]
        said: dict[str, str] = {}
        for trace in traces:
            said |= {key: message for key, message in trace.law.items() if key not in said}
        return [*said.values()]

    @property
    def bound(self) -> float:
        """What is rounding in float64."""
        return compare.BOUND_NORMED if self.first.batch_norm else compare.BOUND

    def differing(self) -> list[Row]:
        """The runs for which the mode's claim does not hold."""
        return [row for row in self.rows if not row.holds(self.bound)]

    @property
    def holds(self) -> bool:
        """True where the mode's claim holds for all that was varied, by the self-check's judgement as well."""
        return not (self.differing() or self.law)

    def cause(self, row: Row) -> str:
        """The one thing that a run which differs has otherwise than a run that holds; "" where it isn't known."""
        holding = [self.base, *(other.variant for other in self.rows if other.holds(self.bound))]
        for other in holding if not self.itself else ():
            apart = [name for name, value in vars(row.variant).items() if value != getattr(other, name)]
            if len(apart) == 1:
                return f"by {_THINGS[apart[0]]} alone: {other.beside(self.base) or 'the first run'} holds"
        return ""

    def varied(self) -> str:
        """What was varied, for the verdict."""
        names = {"nproc": "N =", "threads": "threads", "workers": "workers", "hash_seed": "hash seeds"}
        variants = [self.base, *(row.variant for row in self.rows)]
        values = {word: sorted({getattr(each, name) for each in variants}) for name, word in names.items()}
        parts = [f"{word} {', '.join(map(str, several))}" for word, several in values.items() if len(several) > 1]
        return "; ".join([*parts, *(["order of listed folders"] if self.plan.vary else [])])


def rounding(report: Report, rows: Sequence[Row], trace: Callable[[Variant], Trace]) -> None:
    """Note the difference that these rows keep in float64, or why that can't be run."""
    try:
        first = trace(report.base)
        for row in rows:
            row.wide = compare.compare(first, trace(row.variant), report.bound)
    except (UserError, WorkerFailed, RuntimeError, TypeError) as error:
        # neither a traceback's frames nor a remedy, which are indented
        report.unseen = f"float64 failed: {[line for line in str(error).splitlines() if line[:1].strip()][-1]}"


def print_report(report: Report) -> None:
    """Print the table, the reasons and the verdict."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, _MARGIN + _COLUMN * len(report.rows))
    plan, config, steps = report.plan, report.plan.config, len(report.first.loss)
    mode = f"exact mode ({config.exact} slices)" if config.exact else "plain mode"
    base = f"N = {report.base.nproc}, {report.base.threads} thread(s), {report.base.workers} worker(s)"
    console.print(
        f"{config.recipe}: {config.model.model} on {config.data.dataset}, {mode}, {config.precision}, "
        f"{device_type(config.execution)}, {steps} steps of {config.batch_size}, against {base}"
        + (f", patched by {plan.patch}" if plan.patch else "")
    )
    if steps < plan.steps:
        console.print(f"(--steps {plan.steps}: the run has {steps})")
    table = Table("", *(row.variant.beside(report.base) for row in report.rows))
    for cells in zip(*(row.comparison.rows for row in report.rows), strict=True):
        table.add_row(cells[0].quantity, *map(_cell, cells))
    console.print(table, soft_wrap=False)
    asked = f"Tolerance: {plan.per_step:g} for each step taken. Rounding is what float64 takes away."
    if config.exact:
        asked = f"Asked for: the same bits (loss and gradient norm, added up for this table: {REPORTED:g})."
    console.print(f"Differences are relative to the largest magnitude of a tensor or trajectory. {asked}", style="dim")
    for row in report.differing():
        console.print(f"{row.variant.beside(report.base)} differs: {row.reason}", style="bold")
        if row.wide is not None and report.bound < row.wide.largest and math.isfinite(row.comparison.largest):
            console.print(f"  in float64 {row.wide.largest:.1e} is left of {row.comparison.largest:.1e}")
        if cause := report.cause(row):
            console.print(f"  {cause}")
    if report.itself:
        again = f"the first run, taken again, is another one too: {report.itself}"
        reasons = "by the time, chance, the process's number or what a run left behind, and not by what was varied"
        console.print(f"{again}: {reasons}", style="bold")
    for message in report.law:
        console.print(f"self-check: {message}")
    console.print(_verdict(report), style="bold green" if report.holds else "bold red")


def _cell(row: compare.Row) -> Text:
    text = Text(row.verdict, style=_COLOURS[row.verdict])
    return text.append(f"\n{row.detail}", style="default") if row.detail else text


def _verdict(report: Report) -> str:
    exact = bool(report.plan.config.exact)
    claim = "the same bits" if exact else "the same but for rounding"
    if not report.holds:
        said = f"does not hold: {claim} on {report.varied()}"
        if report.differing():
            return said + (f"; whether that is rounding was not seen: {report.unseen}" if report.unseen else "")
        runs = "float64" if any(row.wide is not None for row in report.rows) else "these steps"
        return f"{said}; the self-check found what {runs} did not show"
    top1 = (report.first.metrics or {}).get("top1", math.nan)
    end = f"top-1 {top1:.2%} after {len(report.first.loss)} steps"
    if exact:
        return f"holds: {claim} on {report.varied()} ({end}; weights_sha256 {report.first.weights_sha256})"
    if any(row.wide is None and not row.comparison.equal for row in report.rows):
        return f"within tolerance on {report.varied()} ({end}); whether that is rounding was not seen: {report.unseen}"
    largest = max((row.wide.largest for row in report.rows if row.wide is not None), default=0.0)
    return f"holds: {claim} on {report.varied()} ({end}; in float64 {largest:.1e} at most)"
