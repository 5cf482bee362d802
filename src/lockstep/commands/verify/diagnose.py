"""Why two numbers of processes differ: what the traces show by themselves, then suspects switched off one at a time.

Re-runs are in float64: rounding then falls by eight orders of magnitude, and nothing else does. A suspect is named
where the difference falls as far with it switched off, on both numbers of processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lockstep.commands.verify import causes, rows
from lockstep.commands.verify.agreement import Comparison
from lockstep.commands.verify.causes import Cause
from lockstep.commands.verify.switching import Rerun, Switching
from lockstep.config import Config

_TOLERANCE_LEFT = 1e-6  # of metrics on the same weights

Evaluate = Callable[[int], dict[str, float]]  # on N processes, the base's final weights


@dataclass
class Diagnosis:
    """What was found out, by number of processes."""

    causes: dict[int, list[Cause]]  # of those that differ beyond what the mode grants, as far as it is known
    float64: dict[int, float] = field(default_factory=dict)  # the largest difference there
    bound: float = 0.0  # up to which that is rounding
    note: str = ""  # why there is none of float64


def diagnose(
    comparisons: Sequence[Comparison], config: Config, rerun: Rerun, evaluate: Evaluate, float64: bool = True
) -> Diagnosis:
    """The causes for each number of processes whose rows do not all hold, and of what holds whether it is rounding."""
    differing = [c for c in comparisons if not c.holds]
    out = Diagnosis({c.other.processes: _from_traces(c) for c in differing})
    unclear = [c for c in differing if not out.causes[c.other.processes] and c.first_step]
    close = [] if config.exact or not float64 else [c for c in comparisons if c.holds and not c.equal]
    for group in (unclear, close):
        if group:
            switching = Switching(config, rerun, group, float64)
            out.causes |= {n: found for n, found in switching.found().items() if found or group is unclear}
            out.float64 |= switching.in_float64()
            out.bound, out.note = switching.bound, switching.failure or out.note
    for c in differing:
        own = out.causes[c.other.processes]
        if not c.row("evaluation").holds:
            own += _evaluation(c, evaluate, all(cause.suspects == (causes.FLOAT64,) for cause in own))
        if not own and not c.row("written").holds:
            own.append(Cause((causes.WRITTEN,), f"{c.row('written').where} differ, and nothing that was followed does"))
        if not own:
            own.append(Cause((causes.NONE,), f"nothing that was tried explains it ({c.place})"))
    base = comparisons[0].base
    for trace in [base] if base.repeats else [c.other for c in comparisons if c.other.repeats]:
        repeats = Cause((causes.ORDER,), "the second epoch repeats the first one's order: the reshuffle is missing")
        out.causes.setdefault(trace.processes, []).append(repeats)
    return out


def _from_traces(comparison: Comparison) -> list[Cause]:
    """What makes everything after it differ and needs no re-run."""
    ledger, replicas, base = comparison.row("ledger"), comparison.row("replicas"), comparison.base
    skipped = comparison.row("skipped steps")
    left_out = not skipped.holds and skipped.step <= ledger.step  # its samples are not in the ledger then
    if not ledger.holds and not left_out:
        epoch = (ledger.step - 1) // max(base.steps_per_epoch, 1) + 1
        late = f": epoch 1 is the same, the reshuffle of epoch {epoch} is not" if epoch > 1 else ""
        return [Cause((causes.ORDER,), f"the samples of a step depend on N from step {ledger.step} on{late}")]
    if not (shares := comparison.row("shares")).holds:
        return [Cause((causes.SHARES,), f"{shares.where} from step {shares.step} on")]
    if not replicas.holds:
        suspect = causes.ORDER if replicas.where.startswith("ledger") else causes.REPLICAS
        return [Cause((suspect,), f"{replicas.where} differ within one run from step {replicas.step} on")]
    if not skipped.holds:
        who = comparison.base if comparison.base.skipped[skipped.step - 1] else comparison.other
        finding = f"step {skipped.step} is left out with N = {who.processes} alone: a gradient was not finite"
        return [Cause((causes.OVERFLOW,), finding)]
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
    row = rows.metrics(base, got, 0.0 if same_weights else _TOLERANCE_LEFT)
    found = Cause((causes.EVALUATION,), f"the same weights get other metrics: {row.where}")
    return [] if row.holds else [found]
