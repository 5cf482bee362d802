"""Re-runs of the first steps with suspects switched off, and the differences that they leave."""

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

_BOUND, _BOUND_NORMED = 1e-10, 1e-8  # what is rounding in float64, without and with batch norm
_GONE, _GONE_NARROW = 1e-3, 1e-2  # of a difference: what counts as none left, in float64 and in float32
_MORE_STEPS = 2  # that a re-run takes after the first one that differs

Off = tuple[str, ...]
# Runs each set of suspects switched off for so many steps, on each number of processes: (N, set) -> trace
Rerun = Callable[[Sequence[int], Sequence[Off], int, Sequence[int]], Mapping[tuple[int, Off], Trace]]


def without(off: Off) -> str:
    """What a re-run goes without, for people."""
    rest = " and ".join(suspect for suspect in off if suspect != causes.FLOAT64)
    return ("in float64" if causes.FLOAT64 in off else "as it is") + (f" without {rest}" if rest else "")


def candidates(comparisons: Sequence[Comparison], config: Config, steps: int) -> list[str]:
    """The suspects that can have a part in it, by what the traces show of the first steps."""
    traces = [trace for c in comparisons for trace in (c.base, c.other)]
    uneven = any(len(set(_pieces(step))) > 1 for trace in traces for step in trace.shares[:steps])
    even = even_batch(config, [trace.processes for trace in traces])
    images = any(not c.row("images").holds for c in comparisons)
    suspected = {
        causes.AUGMENTATION: images,
        causes.MIXING: images and config.samples.mixes,
        causes.LEARNING_RATE: any(not c.row("learning rate").holds for c in comparisons),
        causes.BATCH_NORM: any(trace.batch_norm for trace in traces),
        causes.COMPRESSION: config.link.compress != "none",
        causes.CLIPPING: config.optim.clip_norm > 0,
        causes.UNEVEN: uneven and even <= traces[0].samples_per_epoch,
        causes.ACCUMULATION: config.accumulate > 1 and not config.exact,
        causes.DROPOUT: True,  # a generator of the model's own leaves no trace
    }
    return [suspect for suspect, there in suspected.items() if there]


def _pieces(step: Sequence[Sequence[int]]) -> list[int]:
    """Samples of all pieces of a step, and of all ranks: one value where all shares are even."""
    totals = [sum(rank) * len(step) for rank in step]
    each = [size * len(step) * len(rank) for rank in step for size in rank]
    return totals + (each if len({len(rank) for rank in step}) == 1 else [])


class Switching:
    """The causes of what some comparisons show, by experiment.

    Args:
        unclear: of one run, all beyond tolerance or all within.
        float64: False: leave out what float64 would show.
    """

    def __init__(self, config: Config, rerun: Rerun, unclear: Sequence[Comparison], float64: bool = True) -> None:
        self.config, self.rerun, self.unclear = config, rerun, unclear
        self.base = unclear[0].base
        taken, first = len(self.base.loss), max(c.first_step for c in unclear)
        self.steps = min(first + _MORE_STEPS, taken) if first else taken
        self.traces: dict[tuple[int, Off], Trace] = {}
        self.wide: Off = (causes.FLOAT64,) if float64 else ()
        self.failure = "" if float64 else "--no-float64"  # why there is none
        normed = any(trace.batch_norm for c in unclear for trace in (c.base, c.other))
        self.bound = _BOUND_NORMED if normed else _BOUND

    @property
    def _note(self) -> str:
        return "in float64" if self.wide else f"in {self.config.precision}; {self.failure}"

    def in_float64(self) -> dict[int, float]:
        """The largest difference in float64 by number of processes, where it could be run."""
        return {c.other.processes: self._left(c, ()) for c in self.unclear} if self.wide else {}

    def found(self) -> dict[int, list[Cause]]:
        """By number of processes: rounding, or single suspects; where none explains it two together, then all.

        Nothing where all rows hold and float64 shows no more than rounding, or can't be asked.
        """
        try:
            self._run(self.unclear, [()])
        except (UserError, WorkerFailed, RuntimeError, TypeError) as error:
            if not self.wide:
                raise
            self.wide, self.failure = (), f"float64 failed: {str(error).splitlines()[0]}"
            self._run(self.unclear, [()])
        if not self.wide and self.unclear[0].holds:
            return {c.other.processes: [] for c in self.unclear}
        found = {c.other.processes: self._rounding(c) for c in self.unclear if self._is_rounding(c)}
        suspects = candidates(self.unclear, self.config, self.steps)
        together = [*itertools.combinations(suspects, 2), *([tuple(suspects)] if len(suspects) > 2 else [])]
        for offs in ([(suspect,) for suspect in suspects], together if len(suspects) > 1 else []):
            rest = [c for c in self.unclear if c.other.processes not in found]
            if rest and offs:
                self._run(rest, offs)
                found |= {c.other.processes: named for c in rest if (named := self._named(c, offs))}
        return {
            n: found[n] if n in found else [self._unexplained(c)] for c in self.unclear for n in [c.other.processes]
        }

    def _run(self, comparisons: Sequence[Comparison], offs: Sequence[Off], wide: bool = True) -> None:
        """Run each of `offs` on each number of processes."""
        processes, everywhere = (
            [self.base.processes, *(c.other.processes for c in some)] for some in (comparisons, self.unclear)
        )
        prefix = self.wide if wide else ()
        found = self.rerun(processes, [(*prefix, *off) for off in offs], self.steps, everywhere)
        self.traces |= {(n, off[len(prefix) :]): trace for (n, off), trace in found.items()}

    def _left(self, comparison: Comparison, off: Off) -> float:
        """The largest difference with suspects switched off; inf where one run became non-finite, nan where both."""
        base, other = (self.traces[trace.processes, off] for trace in (comparison.base, comparison.other))
        finite = [_finite(trace) for trace in (base, other)]
        if not all(finite):
            return math.inf if any(finite) else math.nan
        left = agreement.compare(base, other, per_step=0.0)
        of_images = {causes.AUGMENTATION, causes.MIXING}.intersection(off)
        return math.inf if of_images and not left.row("images").holds else left.largest

    def _is_rounding(self, comparison: Comparison) -> bool:
        return bool(self.wide) and self._left(comparison, ()) <= self.bound

    def _rounding(self, comparison: Comparison) -> list[Cause]:
        """What to call a difference that float64 takes away; nothing where plain mode's tolerance grants it."""
        seen, there = comparison.largest, self._left(comparison, ())
        fell = f"in float64 the largest difference falls from {seen:.1e} to {there:.1e}"
        if not math.isfinite(seen):
            what = f"numbers are not finite on one N alone at {comparison.place}; in float64 both agree to {there:.1e}"
            return [Cause((causes.OVERFLOW,), what)]
        if not self.config.exact:
            return [] if comparison.holds else [Cause((causes.FLOAT64,), fell)]
        self._run([comparison], [(causes.ALIGNMENT,)], wide=False)
        if self._left(comparison, (causes.ALIGNMENT,)) <= agreement.REPORTED:
            finding = f"{fell}, and with each piece in memory of its own the bits are the same in {self._precision}"
            return [Cause((causes.ALIGNMENT,), finding)]
        pairs = zip(comparison.base.outputs, comparison.other.outputs, strict=False)
        outputs = next((step for step, (a, b) in enumerate(pairs, 1) if a != b), math.inf)
        if outputs <= comparison.first_step:
            return [Cause((causes.KERNELS,), f"{fell}; the pieces' outputs round otherwise in step {outputs}")]
        return [Cause((causes.FLOAT64,), f"{fell}; until step {comparison.first_step} all outputs are the same bits")]

    @property
    def _precision(self) -> str:
        return self.config.precision

    def _gone(self, left: float, before: float) -> bool:
        """True where what is left of a difference is rounding."""
        if not self.wide:
            return left <= _GONE_NARROW * before
        return left <= min(_GONE * before, self.bound)

    def _named(self, comparison: Comparison, offs: Sequence[Off]) -> list[Cause]:
        """Each of `offs` that takes the difference away; of several together only the first."""
        there, out = self._left(comparison, ()), []
        for off in offs:
            if self._gone(left := self._left(comparison, off), there):
                fall = f"the largest difference falls from {there:.1e} to {left:.1e} ({self._note})"
                out.append(Cause(off, f"without {' and '.join(off)} {fall}"))
        return out if len(offs[0]) == 1 else out[:1]

    def _unexplained(self, comparison: Comparison) -> Cause:
        """What remains where no suspect's removal helps: the data set, a constant factor, or nothing known."""
        base, other = (self.traces[trace.processes, ()] for trace in (comparison.base, comparison.other))
        place = agreement.compare(base, other, self.bound if self.wide else 1e-3).place
        if not comparison.row("images").holds:
            return Cause((causes.DATA,), "the images of a step depend on N, with augmentation off too")
        ratio, by_n = other.norm[0] / base.norm[0] if base.norm[0] else math.nan, other.processes / base.processes
        factors = {by_n: "a sum stands where an average should", 1 / by_n: "it is divided once too often"}
        for factor, what in factors.items():
            if math.isclose(ratio, factor, rel_tol=1e-5):
                finding = f"the first gradient is {ratio:.4g} times that of N = {base.processes}: {what}"
                return Cause((causes.SCALE,), finding)
        finding = f"the difference stays with each of the suspects switched off, and with all of them ({self._note})"
        return Cause((causes.NONE,), f"{finding}; the first to differ there: {place}")


def _finite(trace: Trace) -> bool:
    norms = [norm for norm, skipped in zip(trace.norm, trace.skipped, strict=True) if not skipped]
    return all(math.isfinite(value) for value in (*trace.loss, *norms))
