"""Why two numbers of processes differ: what the traces show by themselves, then suspects switched off one at a time.

Re-runs take the first steps only, in float64: rounding then falls by eight orders of magnitude, and nothing else does.
A suspect is named where the difference falls as far with it switched off, on both numbers of processes.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from lockstep.commands.verify import agreement, causes
from lockstep.commands.verify.agreement import Comparison
from lockstep.commands.verify.causes import Cause
from lockstep.commands.verify.switches import even_batch
from lockstep.commands.verify.trace import Trace
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.processes.failures import WorkerFailed

_GONE, _ROUNDING = 1e-4, 1e-7  # of the difference, and at most: what counts as none left, in float64
_GONE_NARROW = 1e-2  # the same in float32
_MORE_STEPS = 2  # that a re-run takes after the first one that differs
_TOLERANCE_LEFT = 1e-6  # of metrics on the same weights

Off = tuple[str, ...]
# Runs each set of suspects switched off for so many steps, on each number of processes: (N, set) -> trace
Rerun = Callable[[Sequence[int], Sequence[Off], int, Sequence[int]], Mapping[tuple[int, Off], Trace]]
Evaluate = Callable[[int], dict[str, float]]  # on N processes, the base's final weights


def diagnose(
    comparisons: Sequence[Comparison], config: Config, rerun: Rerun, evaluate: Evaluate
) -> dict[int, list[Cause]]:
    """The causes for each number of processes whose rows do not all hold."""
    differing = [c for c in comparisons if not c.holds]
    found = {c.other.processes: _from_traces(c) for c in differing}
    unclear = [c for c in differing if not found[c.other.processes] and c.first_step]
    if unclear:
        found |= _Switching(config, rerun, unclear).found()
    for c in differing:
        own = found[c.other.processes]
        if not c.row("evaluation").holds:
            own += _evaluation(c, evaluate, all(cause.suspects == (causes.FLOAT64,) for cause in own))
        if not own:
            own.append(Cause((causes.NONE,), "nothing that was tried explains it"))
    base = comparisons[0].base
    for trace in [base] if base.repeats else [c.other for c in comparisons if c.other.repeats]:
        repeats = Cause((causes.ORDER,), "the second epoch repeats the first one's order: the reshuffle is missing")
        found.setdefault(trace.processes, []).append(repeats)
    return found


def without(off: Off) -> str:
    """What a re-run goes without, for people."""
    rest = " and ".join(suspect for suspect in off if suspect != causes.FLOAT64)
    return ("in float64" if causes.FLOAT64 in off else "as it is") + (f" without {rest}" if rest else "")


def _from_traces(comparison: Comparison) -> list[Cause]:
    """What makes everything after it differ and needs no re-run."""
    ledger, replicas, base = comparison.row("ledger"), comparison.row("replicas"), comparison.base
    if not ledger.holds:
        epoch = (ledger.step - 1) // max(base.steps_per_epoch, 1) + 1
        late = f": epoch 1 is the same, the reshuffle of epoch {epoch} is not" if epoch > 1 else ""
        return [Cause((causes.ORDER,), f"the samples of a step depend on N from step {ledger.step} on{late}")]
    if not replicas.holds:
        suspect = causes.ORDER if replicas.where.startswith("ledger") else causes.REPLICAS
        return [Cause((suspect,), f"{replicas.where} differ within one run from step {replicas.step} on")]
    return []


def _evaluation(comparison: Comparison, evaluate: Evaluate, only_rounding: bool) -> list[Cause]:
    """Evaluation itself, where it gives the same weights other metrics."""
    base, other = comparison.base.metrics or {}, comparison.other.metrics or {}
    if base["count"] != other["count"]:
        finding = f"{base['count']} samples are counted with N = {comparison.base.processes}, and {other['count']} here"
        return [Cause((causes.EVALUATION,), finding)]
    if not only_rounding:  # other weights have other metrics
        return []
    same_weights = comparison.base.digests[-1] == comparison.other.digests[-1]
    got = other if same_weights else evaluate(comparison.other.processes)
    row = agreement.metrics(base, got, 0.0 if same_weights else _TOLERANCE_LEFT)
    found = Cause((causes.EVALUATION,), f"the same weights get other metrics: {row.where}")
    return [] if row.holds else [found]


def candidates(comparisons: Sequence[Comparison], config: Config, steps: int) -> list[str]:
    """The suspects that can have a part in it, by what the traces show of the first steps."""
    traces = [trace for c in comparisons for trace in (c.base, c.other)]
    uneven = any(len(set(_pieces(step))) > 1 for trace in traces for step in trace.shares[:steps])
    even = even_batch(config, [trace.processes for trace in traces])
    suspected = {
        causes.AUGMENTATION: any(not c.row("images").holds for c in comparisons),
        causes.LEARNING_RATE: any(not c.row("learning rate").holds for c in comparisons),
        causes.BATCH_NORM: any(trace.batch_norm for trace in traces),
        causes.DROPOUT: any(trace.draws for trace in traces),
        causes.COMPRESSION: config.link.compress != "none",
        causes.UNEVEN: uneven and even <= traces[0].samples_per_epoch,
    }
    return [suspect for suspect, there in suspected.items() if there]


def _pieces(step: Sequence[Sequence[int]]) -> list[int]:
    """Samples of all pieces of a step, and of all ranks: one value where all shares are even."""
    totals = [sum(rank) * len(step) for rank in step]
    each = [size * len(step) * len(rank) for rank in step for size in rank]
    return totals + (each if len({len(rank) for rank in step}) == 1 else [])


class _Switching:
    """Re-runs of the first steps with suspects switched off, and the differences that they leave."""

    def __init__(self, config: Config, rerun: Rerun, unclear: Sequence[Comparison]) -> None:
        self.config, self.rerun, self.unclear = config, rerun, unclear
        self.base = unclear[0].base
        self.steps = min(max(c.first_step for c in unclear) + _MORE_STEPS, len(self.base.loss))
        self.traces: dict[tuple[int, Off], Trace] = {}
        self.wide: Off = (causes.FLOAT64,)
        self.note = "in float64"

    def found(self) -> dict[int, list[Cause]]:
        """By number of processes: single suspects; where none explains it two together, then all; else what remains."""
        suspects = candidates(self.unclear, self.config, self.steps)
        alone: list[Off] = [(suspect,) for suspect in suspects]
        try:
            self._run(self.unclear, [(), *alone])
        except (UserError, WorkerFailed, RuntimeError, TypeError) as error:
            self.wide, self.note = (), f"in {self.config.precision}; float64 failed: {str(error).splitlines()[0]}"
            self._run(self.unclear, [(), *alone])
        found = {c.other.processes: self._named(c, alone) for c in self.unclear}
        rest = [c for c in self.unclear if not found[c.other.processes]]
        if rest and len(suspects) > 1:
            together = [*itertools.combinations(suspects, 2), *([tuple(suspects)] if len(suspects) > 2 else [])]
            self._run(rest, together)
            found |= {c.other.processes: self._named(c, together)[:1] for c in rest}
        return {c.other.processes: found[c.other.processes] or [self._unexplained(c)] for c in self.unclear}

    def _run(self, comparisons: Sequence[Comparison], offs: Sequence[Off]) -> None:
        """Run each of `offs` on each number of processes."""
        processes, everywhere = (
            [self.base.processes, *(c.other.processes for c in some)] for some in (comparisons, self.unclear)
        )
        found = self.rerun(processes, [(*self.wide, *off) for off in offs], self.steps, everywhere)
        self.traces |= {(n, off[len(self.wide) :]): trace for (n, off), trace in found.items()}

    def _left(self, comparison: Comparison, off: Off) -> float:
        """The largest difference with suspects switched off; nan where a run became non-finite."""
        base, other = (self.traces[trace.processes, off] for trace in (comparison.base, comparison.other))
        if not all(math.isfinite(value) for trace in (base, other) for value in (*trace.loss, *trace.norm)):
            return math.nan
        left = agreement.compare(base, other, per_step=0.0)
        return math.inf if causes.AUGMENTATION in off and not left.row("images").holds else left.largest

    def _gone(self, left: float, before: float) -> bool:
        """True where what is left of a difference is rounding."""
        if not self.wide:
            return left <= _GONE_NARROW * before
        return before > 0 and left <= min(_GONE * before, _ROUNDING)

    def _named(self, comparison: Comparison, offs: Sequence[Off]) -> list[Cause]:
        """Rounding where float64 alone takes the difference away; else each of `offs` that does."""
        there, seen = self._left(comparison, ()), comparison.largest
        fall = "the largest difference falls from"
        if self.wide and self._gone(there, seen):
            return [Cause((causes.FLOAT64,), f"in float64 {fall} {seen:.1e} to {there:.1e}")]
        out = []
        for off in offs:
            if self._gone(left := self._left(comparison, off), there):
                out.append(Cause(off, f"without {' and '.join(off)} {fall} {there:.1e} to {left:.1e} ({self.note})"))
        return out

    def _unexplained(self, comparison: Comparison) -> Cause:
        """What remains where no suspect's removal helps: the data set, a constant factor, or nothing known."""
        if not comparison.row("images").holds:
            return Cause((causes.DATA,), "the images of a step depend on N, with augmentation off too")
        base, other = (self.traces[trace.processes, ()] for trace in (comparison.base, comparison.other))
        ratio, by_n = other.norm[0] / base.norm[0] if base.norm[0] else math.nan, other.processes / base.processes
        factors = {by_n: "a sum stands where an average should", 1 / by_n: "it is divided once too often"}
        for factor, what in factors.items():
            if math.isclose(ratio, factor, rel_tol=1e-5):
                finding = f"the first gradient is {ratio:.4g} times that of N = {base.processes}: {what}"
                return Cause((causes.SCALE,), finding)
        finding = f"the difference stays with each of the suspects switched off, and with all of them ({self.note})"
        return Cause((causes.NONE,), finding)
