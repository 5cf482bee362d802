"""Two traces side by side, quantity by quantity."""

from dataclasses import dataclass, replace

import numpy as np

from lockstep.commands.verify import rows
from lockstep.commands.verify.rows import Row
from lockstep.commands.verify.trace import KINDS, Trace

REPORTED = 1e-12  # of float64 sums that are made for the trace alone, and so are added over ranks as they come
_SMALL = 16.0  # times the tolerance for gradients, which are small sums of large terms

_RESULTS = ("loss", "gradient norm", "gradients", "optimizer", "weights", "buffers")  # as a step makes them
_MATHS = ("images", "learning rate", *_RESULTS)  # what a re-run can find something about


@dataclass(frozen=True)
class Comparison:
    """N processes against the first number, by quantity."""

    base: Trace
    other: Trace
    rows: list[Row]

    def row(self, quantity: str) -> Row:
        """The row of a quantity."""
        return next(row for row in self.rows if row.quantity == quantity)

    @property
    def holds(self) -> bool:
        """True where the mode's claim holds for every quantity."""
        return all(row.holds for row in self.rows)

    @property
    def equal(self) -> bool:
        """True where nothing that a step leaves differs in a single bit."""
        return all(row.verdict in ("equal", "none") for row in self.rows if row.quantity not in _RESULTS[:2])

    @property
    def largest(self) -> float:
        """The largest difference of the results; inf where one became non-finite."""
        return max(self.row(quantity).largest for quantity in _RESULTS)

    @property
    def first_step(self) -> int:
        """The first step beyond tolerance of what a re-run can explain; 0 for none."""
        found = map(self.row, _MATHS)
        return min((row.step for row in found if not row.holds and row.step), default=0)

    @property
    def place(self) -> str:
        """The first step beyond tolerance and what differs there, for people."""
        found = [row for row in map(self.row, _MATHS) if not row.holds and row.step == self.first_step]
        parts = [f"{row.quantity} ({row.where}, {row.largest:.1e})" if row.where else row.quantity for row in found]
        return f"step {self.first_step}: {', '.join(parts)}" if parts else "no step"


def compare(base: Trace, other: Trace, per_step: float) -> Comparison:
    """All quantities of two traces of one config. per_step: the tolerance, 0 for bits."""
    repeated = " and ".join(f"N = {trace.processes}" for trace in (base, other) if trace.repeats)
    note = f"epoch 2 repeats epoch 1 ({repeated})" if repeated else ""
    limits = per_step * np.arange(1, len(base.loss) + 1)
    found = [
        replace(rows.exact("ledger", base.ledger, other.ledger), where=note),
        rows.shares(base, other),
        rows.exact("images", base.images, other.images),
        rows.numbers("learning rate", base.lr, other.lr, 0 * limits),
        rows.exact("skipped steps", base.skipped, other.skipped),
        rows.numbers("loss", base.loss, other.loss, np.maximum(limits, REPORTED)),
        rows.numbers("gradient norm", base.norm, other.norm, np.maximum(limits, REPORTED)),
        *(rows.tensors(kind, base, other, limits * (_SMALL if kind == "gradients" else 1)) for kind in KINDS),
        rows.replicas(other if other.diverged or base.processes == 1 else base),
    ]
    if base.metrics is not None and other.metrics is not None:
        explained = any(row.verdict != "equal" for row in found if row.quantity in ("weights", "buffers"))
        metrics = rows.metrics(base.metrics, other.metrics, limits[-1])
        found += [metrics, rows.written(base, other, explained or metrics.verdict != "equal", per_step == 0)]
    return Comparison(base, other, found)
