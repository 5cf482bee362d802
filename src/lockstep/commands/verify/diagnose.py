"""Why two numbers of processes differ: what the traces show by themselves, then suspects switched off one at a time.

Re-runs take the first steps only, in float64: rounding then falls by eight orders of magnitude, and nothing else does.
A suspect is named where the difference falls as far with it switched off, on both numbers of processes.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.commands.verify import agreement
from lockstep.commands.verify.agreement import Row
from lockstep.commands.verify.causes import DATA, EVALUATION, NONE, ORDER, REPLICAS, SCALE, Cause, cause_of
from lockstep.commands.verify.switches import (  # fmt: skip
    AUGMENTATION,
    BATCH_NORM,
    COMPRESSION,
    DROPOUT,
    FLOAT64,
    LEARNING_RATE,
    UNEVEN,
    even_batch,
)
from lockstep.commands.verify.trace import Trace
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.processes.launcher import WorkerFailed

_GONE, _ROUNDING = 1e-4, 1e-7  # of the difference, and at most: what counts as none left, in float64
_GONE_NARROW = 1e-2  # the same in float32
_MORE_STEPS = 2  # that a re-run takes after the first one that differs
_TOLERANCE_LEFT = 1e-6  # of metrics on the same weights


@dataclass(frozen=True)
class Comparison:
    """N processes against the first number."""

    base: Trace
    other: Trace
    rows: list[Row]

    def row(self, quantity: str) -> Row:
        """The row of a quantity."""
        return next(row for row in self.rows if row.quantity == quantity)


Off = tuple[str, ...]
# Runs each set of suspects switched off for so many steps, on each number of processes: (N, set) -> trace
Rerun = Callable[[Sequence[int], Sequence[Off], int, Sequence[int]], Mapping[tuple[int, Off], Trace]]
Evaluate = Callable[[int], dict[str, float]]  # on N processes, the base's final weights


def diagnose(
    comparisons: Sequence[Comparison], config: Config, rerun: Rerun, evaluate: Evaluate
) -> dict[int, list[Cause]]:
    """The causes for each number of processes whose rows do not all hold."""
    differing = [c for c in comparisons if not all(row.holds for row in c.rows)]
    causes = {c.other.processes: _plain_to_see(c, config) for c in differing}
    unclear = [c for c in differing if not causes[c.other.processes] and agreement.first_step(c.rows)]
    if unclear:
        causes |= _by_switching(unclear, config, rerun)
    for c in differing:
        found = causes[c.other.processes]
        if not c.row("evaluation").holds:
            found += _evaluation(c, config, evaluate, all(cause.suspects == (FLOAT64,) for cause in found))
    nothing = cause_of(config, NONE, finding="nothing that was tried explains it")
    return {n: found or [nothing] for n, found in causes.items()}


def order_repeats(config: Config) -> Cause:
    """The cause where a run's epochs share one order."""
    return cause_of(config, ORDER, finding="the second epoch repeats the first one's order: the reshuffle is missing")


def without(off: Off) -> str:
    """What a re-run goes without, in words."""
    rest = [suspect for suspect in off if suspect != FLOAT64]
    return ("in float64" if FLOAT64 in off else "as it is") + (f" without {' and '.join(rest)}" if rest else "")


def _plain_to_see(comparison: Comparison, config: Config) -> list[Cause]:
    """What makes everything after it differ and needs no re-run."""
    ledger, replicas, base = comparison.row("ledger"), comparison.row("replicas"), comparison.base
    if not ledger.holds:
        epoch = (ledger.step - 1) // max(base.steps_per_epoch, 1) + 1
        late = f": epoch 1 is the same, the reshuffle of epoch {epoch} is not" if epoch > 1 else ""
        return [cause_of(config, ORDER, finding=f"the samples of a step depend on N from step {ledger.step} on{late}")]
    if not replicas.holds:
        suspect = ORDER if replicas.where.startswith("ledger") else REPLICAS
        return [
            cause_of(config, suspect, finding=f"{replicas.where} differ within one run from step {replicas.step} on")
        ]
    return []


def _evaluation(comparison: Comparison, config: Config, evaluate: Evaluate, only_rounding: bool) -> list[Cause]:
    """Evaluation itself, where it gives the same weights other metrics."""
    base, other = comparison.base.metrics or {}, comparison.other.metrics or {}
    if base["count"] != other["count"]:
        finding = f"{base['count']} samples are counted with N = {comparison.base.processes}, and {other['count']} here"
        return [cause_of(config, EVALUATION, finding=finding)]
    if not only_rounding:  # other weights have other metrics
        return []
    same_weights = comparison.base.digests[-1:] == comparison.other.digests[-1:]
    got = other if same_weights else evaluate(comparison.other.processes)
    row = agreement.metrics(base, got, 0.0 if same_weights else _TOLERANCE_LEFT)
    return (
        [] if row.holds else [cause_of(config, EVALUATION, finding=f"the same weights get other metrics: {row.where}")]
    )


def candidates(comparisons: Sequence[Comparison], config: Config, steps: int) -> list[str]:
    """The suspects that can have a part in it, by what the traces show of the first steps."""
    traces = [trace for c in comparisons for trace in (c.base, c.other)]
    out = []
    if any(not c.row("images").holds for c in comparisons):
        out.append(AUGMENTATION)
    if any(not c.row("learning rate").holds for c in comparisons):
        out.append(LEARNING_RATE)
    if any(trace.batch_norm for trace in traces):
        out.append(BATCH_NORM)
    if any(trace.draws for trace in traces):
        out.append(DROPOUT)
    if config.link.compress != "none":
        out.append(COMPRESSION)
    processes = [trace.processes for trace in traces]
    uneven = any(len(set(_pieces(step))) > 1 for trace in traces for step in trace.shares[:steps])
    if uneven and even_batch(config, processes) <= traces[0].samples_per_epoch:
        out.append(UNEVEN)
    return out


def _pieces(step: Sequence[Sequence[int]]) -> list[int]:
    """Samples of all pieces of a step, and of all ranks: one value where all shares are even."""
    totals = [sum(rank) * len(step) for rank in step]
    each = [size * len(step) * len(rank) for rank in step for size in rank]
    return totals + (each if len({len(rank) for rank in step}) == 1 else [])


class _Switching:
    """Re-runs of the first steps with suspects switched off, and the differences that they leave."""

    def __init__(self, config: Config, rerun: Rerun, everywhere: Sequence[int], steps: int) -> None:
        self.config, self.rerun, self.everywhere, self.steps = config, rerun, everywhere, steps
        self.traces: dict[tuple[int, Off], Trace] = {}
        self.wide: Off = (FLOAT64,)
        self.note = "in float64"

    def start(self, offs: Sequence[Off]) -> None:
        """Run as it is and with each of `offs`: in float64, or in the run's own precision where that fails."""
        try:
            self.run(self.everywhere, [(), *offs])
        except (UserError, WorkerFailed, RuntimeError, TypeError) as error:
            self.wide, self.note = (), f"in {self.config.precision}; float64 failed: {str(error).splitlines()[0]}"
            self.run(self.everywhere, [(), *offs])

    def run(self, processes: Sequence[int], offs: Sequence[Off]) -> None:
        """Run each of `offs` on each number of processes."""
        self.traces |= self.rerun(processes, [(*self.wide, *off) for off in offs], self.steps, self.everywhere)

    def trace(self, processes: int, off: Off) -> Trace:
        """The trace of a re-run."""
        return self.traces[processes, (*self.wide, *off)]

    def left(self, comparison: Comparison, off: Off) -> float:
        """The largest difference with suspects switched off; nan where a run became non-finite."""
        base, other = (self.trace(c.processes, off) for c in (comparison.base, comparison.other))
        if not all(math.isfinite(value) for trace in (base, other) for value in (*trace.loss, *trace.norm)):
            return math.nan
        rows = agreement.compare(base, other, per_step=0.0)
        if AUGMENTATION in off and not next(row for row in rows if row.quantity == "images").holds:
            return math.inf
        return agreement.largest(rows)

    def gone(self, left: float, before: float) -> bool:
        """True where what is left of a difference is rounding."""
        if not self.wide:
            return left <= _GONE_NARROW * before
        return before > 0 and left <= min(_GONE * before, _ROUNDING)

    def name(self, comparison: Comparison, offs: Sequence[Off]) -> list[Cause]:
        """Rounding where float64 alone takes the difference away; else each of `offs` that does."""
        there, seen = self.left(comparison, ()), agreement.largest(comparison.rows)
        fall = "the largest difference falls from"
        if self.wide and self.gone(there, seen):
            finding = f"in float64 {fall} {seen:.1e} to {there:.1e}"
            return [cause_of(self.config, FLOAT64, finding=finding)]
        out = []
        for off in offs:
            if self.gone(left := self.left(comparison, off), there):
                finding = f"without {' and '.join(off)} {fall} {there:.1e} to {left:.1e} ({self.note})"
                out.append(cause_of(self.config, *off, finding=finding))
        return out


def _by_switching(unclear: Sequence[Comparison], config: Config, rerun: Rerun) -> dict[int, list[Cause]]:
    base = unclear[0].base
    steps = min(max(agreement.first_step(c.rows) for c in unclear) + _MORE_STEPS, len(base.loss))
    switching = _Switching(config, rerun, [base.processes, *(c.other.processes for c in unclear)], steps)
    suspects = candidates(unclear, config, steps)
    alone = [(suspect,) for suspect in suspects]
    switching.start(alone)
    out = {c.other.processes: switching.name(c, alone) for c in unclear}
    open_ = [c for c in unclear if not out[c.other.processes]]
    if open_ and len(suspects) > 1:
        together = [*itertools.combinations(suspects, 2), *([tuple(suspects)] if len(suspects) > 2 else [])]
        switching.run([base.processes, *(c.other.processes for c in open_)], together)
        out |= {c.other.processes: switching.name(c, together)[:1] for c in open_}
    return {c.other.processes: out[c.other.processes] or _unexplained(c, config, switching) for c in unclear}


def _unexplained(comparison: Comparison, config: Config, switching: _Switching) -> list[Cause]:
    """What remains where no suspect's removal helps: a constant factor, the data set, or nothing known."""
    if not comparison.row("images").holds:
        return [cause_of(config, DATA, finding="the images of a step depend on N, with augmentation off too")]
    base, other = (switching.trace(trace.processes, ()) for trace in (comparison.base, comparison.other))
    ratio, by_n = other.norm[0] / base.norm[0] if base.norm[0] else math.nan, other.processes / base.processes
    for factor, what in ((by_n, "a sum stands where an average should"), (1 / by_n, "it is divided once too often")):
        if math.isclose(ratio, factor, rel_tol=1e-5):
            finding = f"the first gradient is {ratio:.4g} times that of N = {base.processes}: {what}"
            return [cause_of(config, SCALE, finding=finding)]
    finding = f"the difference stays with each of the suspects switched off, and with all of them ({switching.note})"
    return [cause_of(config, NONE, finding=finding)]
