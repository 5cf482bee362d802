"""Does the number of processes change what a step computes? Measured at real steps, on the real model.

On a process's steps 0, 1, 2, 4, ... 4,096 and every 4,096th the batch that was just taken is taken again, shared out
otherwise: cut in two, whatever the number of ranks; now and then in three and a single sample by itself, seldom with
other numbers of threads, and as a whole by one of them. Everything is put back before and after. Gradients, loss,
buffers and what else the model keeps are compared; what differs beyond rounding (that of inputs a few units in the
last place away) is named, with its cause where a small experiment tells (find_cause.py). A run says one sentence, in
the same words on any number of processes: the strongest kind of difference, the first of that kind in the model's
order, and the cause that the same samples show on rank 0.
"""

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lockstep.config.execution import Law
from lockstep.data.loaders import Batch, last_again
from lockstep.distributed.world import pretended_process
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import batch_norms
from lockstep.parallel.buffers import put_together
from lockstep.parallel.fsdp import is_sharded
from lockstep.parallel.given_statistics import GivenStatistics
from lockstep.parallel.hidden_state import (
    LENGTH,
    HiddenState,
    digest,
    generators_around,
    is_of_the_process,
    same,
)
from lockstep.parallel.module_state import as_real, replaced
from lockstep.training.batch_rows import Rows, all_rows, cut, exchange, micro_batches, moved_boundaries
from lockstep.training.exact_check import compare_slices
from lockstep.training.find_cause import ELSEWHERE, find_cause
from lockstep.training.outcomes import AGAIN, KINDS, Finding, Outcome, following, moved_apart, norms_of, with_slopes
from lockstep.training.step_passes import NOISE, TRIES, Step, StepPasses, comparing, named, uncollected
from lockstep.training.update_check import follows, held, trials

States = list[tuple[int, HiddenState]]  # the samples of each part, and what it left
_SELDOM = 4096  # steps between two checks, once a run has gone on for so long
_SINGLE = 4  # the first, the fifth, ... check passes a single sample by itself, which is cheap
_THOROUGH = {1, 16}  # the checks that change threads, and have one of several ranks take all: four steps or more
_MOST = 4  # times its own share that a rank takes; more would keep too many others waiting for too long
_BUFFERS, _FAR = 50.0, 5e-2  # times the limit, but no farther
_SMALL = 1e12  # what comes to this doesn't overflow in another order
_OTHERWISE = "what its samples do to it on several processes comes to something else than on one"
_UNEVEN = [
    "batch norm is called more often for some samples than for others: a process would wait for others that call it "
    "less often, for ever",
    "Call it once for the batch, or take --batch-norm groups:SAMPLES or local, where nobody waits.",
]

_reported = WeakKeyDictionary[nn.Module, set[str]]()  # of a model that has several steps, too: a sentence a run


def is_checked(step: int) -> bool:
    """Of the steps that a process takes: true on steps 0, 1, 2, 4, 8, ... 4,096, and on every 4,096th."""
    return step & (step - 1) == 0 or step % _SELDOM == 0


class SelfCheck(StepPasses):
    """Compares steps with themselves, shared out otherwise.

    Args:
        step: the training step, between whose passes and update it is called.
        law: "warn" reports what differs, "strict" raises it, "off" looks at nothing.
    """

    def __init__(self, step: Step, law: Law) -> None:
        super().__init__(step)
        self.law = law
        self.report = self._warn
        self._most = _MOST
        self._takers: dict[tuple[int, int], tuple[int, int]] = {}  # as which rank of how many a part passes
        self.again = self._second = self._thorough = self._uneven = False
        self._seen, self._reported = set[tuple[str, str]](), _reported.setdefault(self.bare, set())
        self._added: dict[str, Tensor | bool] = {}  # buffers whose changes are added up
        self._notes: GivenStatistics | None = None
        # what part of the batch leaves otherwise, first of all this name, and the states that the batch and it leave
        self._left: tuple[str, HiddenState, HiddenState] | None = None
        # generators after the step before, the loop's among them; and each pass of the step under way
        self._loops, self._before = dict[str, Any](), list[HiddenState]()
        self._between: HiddenState | None = None
        if self._looks():
            comparing.add(self)

    @property
    def _closer(self) -> bool:
        """Whether this check takes more passes than most."""
        return self._second or self.checked in _THOROUGH or self.checked % _SINGLE == 1

    def _looks(self) -> bool:
        return self.law != "off" and self.step.sync.comparable

    def due(self) -> bool:
        """Whether a step is compared that is to be, by itself (`is_checked`) or because the one before left a doubt."""
        self._second, self.again = self.again, False
        return self._looks()

    def _warn(self, finding: Finding, first: bool) -> None:
        if first and self.rank == 0 and self.step.own_loop:
            warnings.warn(f'{finding.message}. TrainStep(..., law="off") looks no more', stacklevel=7)
        elif first and self.rank == 0:
            print(finding.note, file=sys.stderr)

    def note_said(self) -> None:
        """The run has said already that weights will differ."""
        self._reported.add("")

    def note_generators(self, frame: FrameType | None) -> None:
        """Before a step that is compared: is anything drawn until then? `frame`: of the loop, where it is a user's."""
        if self._looks():
            self._loops = generators_around(frame)
            self._between = HiddenState(self._loops, self.devices)

    def _drawn(self, batch: Batch) -> list[Finding]:
        """Where an image is another one than alone or elsewhere, or the loop changes images by random numbers."""
        changed: list[str] = []
        if self._between is not None and batch.changed:
            now, before = self.start.values | self._moved, self._between.values
            changed = [name for name, value in before.items() if not same(value, now.get(name))]
        seen = self.gather([*last_again(batch), *changed[:1]])
        if found := [Finding(batch.step, "batch", place, math.inf, cause) for place, cause, *_ in seen if cause]:
            return found[:1]
        cause = "the batch is not as the loader gave it, and was changed by random numbers of"
        return [Finding(batch.step, "batch", name, math.inf, cause) for _, _, *names in seen for name in names][:1]

    @uncollected()
    def take_passes(self, batch: Batch) -> list[Tensor]:
        """The passes of a step that is compared."""
        step = self.step
        self.versions = self.versions_now() if step.passes_write is False else {}
        self.start, self._moved = self.state(), HiddenState(self._loops).values
        self._before, self._slopes, self._left = [self.start], dict[tuple[int, int], Tensor](), None
        self._notes = None if step.sync.exact or is_sharded(step.model) else GivenStatistics(self.bare)

        loss = step.loss

        def before_pass(i: int) -> None:
            if i and not step.sync.exact:
                with replaced(step, loss=loss):
                    self._before.append(self.state())
            if self._notes is not None:
                self._notes.begin()

        def noting(outputs: Any, labels: Tensor) -> Any:
            i = len(self._before) - 1
            return loss(
                with_slopes(outputs, len(labels), lambda k, slope: self._slopes.update({(i, k): slope})), labels
            )

        notes = nullcontext() if self._notes is None else self._notes.noted()
        with notes, replaced(step, before_pass=before_pass, loss=noting if step.whole_batch else loss):
            return step.take_passes(batch)

    @uncollected()
    def compare(self, batch: Batch, found: Sequence[Tensor]) -> None:
        """After the gradients of a step have come together, and before the update.

        Raises:
            UserError: where something differs and the law is strict, or the model takes no single sample.
        """
        step, end = self.step, self.state()
        actual = Outcome(step.take_gradients(), self.loss(found, batch.shards), end)
        self.computes_in({value.dtype for value in found})
        self.checked, self.at = self.checked + 1, batch.step
        kept = {**vars(step.sync)}, {**vars(step.host_generators)}, step.draws
        try:
            moved = self._everyones(self.moved_in_evaluation(batch, self.start))
            findings = [*self._drawn(batch), *(moved[:1] or self._findings(batch, actual))]
            with self.in_full_precision() if self.low and self.casts_itself is False else nullcontext():
                findings = [self._explained(each, batch) for each in findings if each.what not in self._reported]
            findings = [each for each in findings if self._is_news(each)]
        finally:
            vars(step.sync).update(kept[0])
            vars(step.host_generators).update(kept[1])
            actual.state.restore()
            step.give_gradients(actual.gradients)
            self._before, self._notes, self._between, self._loops, self.evaluated = [], None, None, {}, None
        step.sync.sequential |= any(finding.what == "bits" for finding in findings)
        self._report(findings)

    @uncollected()
    def compare_update(self, number: int, update: Callable[[], object], own_code: bool) -> None:
        """Take the update of step `number`, and compare what it makes of the optimizer and the weights.

        Raises:
            UserError: where that differs and the law is strict.
        """
        tries = own_code and not is_sharded(self.step.model)
        tried, left = trials(self, update) if tries else [], ""
        if tries and self._left is not None and follows(self, update, *self._left[1:]):
            left = self._left[0]
        self._left = None
        update()
        found = self.gather([left, *tried, *([held(self.step)] if self.ranks > 1 else [])])
        tried = [each for _, *of_rank in found for each in of_rank[: len(tried)]]
        ends = [each for _, *of_rank in found for each in of_rank[-1:]]
        apart = [name for each in (tried, ends) for other in each for name in other if other[name] != each[0].get(name)]
        cause = "the update depends on the process, on how many there are, or on the time, first in"
        if not apart and (apart := [name for name, *_ in found if name]):
            cause = "the update follows what the samples of one process leave in"
        if apart and "update" not in self._reported:
            self._report([Finding(number, "update", apart[0], math.inf, cause)])

    def _report(self, findings: list[Finding]) -> None:
        for finding in findings:
            first = not self._reported
            self._reported.add(finding.what)
            if self.law == "strict":
                raise UserError(f"--law strict: {finding.message}", "Mend that, or give --law warn.")
            self.report(finding, first)

    def _everyones(self, found: list[Finding]) -> list[Finding]:
        return [Finding(**each) for of_rank in self.gather([asdict(each) for each in found]) for each in of_rank]

    def _findings(self, batch: Batch, actual: Outcome) -> list[Finding]:
        """At most one of each kind, the strongest first; the same on all ranks."""
        finite = actual.norms.isfinite()
        if not bool(torch.isfinite(actual.loss).all()) or not finite.all():
            return self._not_finite(batch, finite.tolist())
        if self.step.sync.exact:
            return compare_slices(self, batch, actual)
        if is_sharded(self.step.model):
            return self._sharded(batch, actual)
        return self._shared_out(batch, actual)

    def _not_finite(self, batch: Batch, finite: list[bool]) -> list[Finding]:
        """Where several ranks come to something that isn't finite, and rank 0 as one process to small numbers."""
        names, step = list[str](), self.step
        overflows = step.autocast_dtype == torch.float16  # all the time
        if 1 < self.ranks <= self._most and not (overflows or step.sync.exact or is_sharded(step.model)):
            ranges = self.ranges(batch)
            shares = self._exchanged(batch, ranges, [micro_batches(ranges), *[[]] * (self.ranks - 1)])
            self.start.restore()
            with suppress(Exception), self.by_itself():  # one after the other, each from what the last has left
                losses = [self.loss(step.take_passes(one), one.shards, everywhere=False) for _, one in shares]
                if all(bool((v.abs() < _SMALL).all()) for v in (*losses, norms_of(step.take_gradients()))):
                    names = [name for name, each in zip(step.named, finite, strict=True) if not each] or [""]
            step.take_gradients()
        names = self.gather(names[:1])[0]
        return [Finding(batch.step, "gradient" if name else "loss", name, math.inf) for name in names]

    def _is_news(self, finding: Finding) -> bool:
        """Whether it is beyond doubt, or has been seen before."""
        seen = finding.what, finding.place  # a unit that rounding turns off is in another layer each time
        sure = finding.placed or finding.size > self.sure or finding.what not in ("gradient", "loss", "buffer")
        if sure or seen in self._seen:
            return True
        self._seen.add(seen)
        self.again = True
        return False

    def _explained(self, finding: Finding, batch: Batch) -> Finding:
        """The finding with its cause, as far as experiments on rank 0 tell. All ranks call it together."""
        if finding.cause or finding.what not in ("gradient", "loss") or is_sharded(self.step.model):
            return finding
        ranges, place, cause = self.ranges(batch), "", ""
        most = max(shards[0][1] - shards[0][0] for shards in ranges) * self._most
        some = [(i, start, min(stop, start + most)) for i, start, stop in micro_batches(ranges)]
        for i, one in self._exchanged(batch, ranges, [some, *[[]] * (self.ranks - 1)]):
            if not cause and not self.step.whole_batch and one.shards[0].size > 1:
                with suppress(torch.OutOfMemoryError):  # it keeps what every module gives
                    place, cause = find_cause(self, one, self._before[i])
        place, cause = self.gather([place, cause])[0]
        cause = cause or self._of_ranks(batch, ranges)
        if place and (module := dict(self.bare.named_modules()).get(place)) is not None:
            place += " (batch norm)" if module in batch_norms(self.bare) else f" ({type(module).__name__})"
        return replace(finding, cause=f"{place}: {cause}" if place else cause, placed=bool(place))

    def _of_ranks(self, batch: Batch, ranges: list[list[tuple[int, int]]]) -> str:
        """Whether rank 0's samples give something else on another rank, and why: one thing after the other is changed.
        All ranks call it together. One process takes them as one of two ranks, and as the other."""
        ((_, one),) = self._exchanged(batch, ranges, [[(0, *ranges[0][0])]] * self.ranks)
        mine = {name: str(value) for name, value in held(self.step).items()}
        values = self.start.values.items()
        mine |= {name: digest(value) for name, value in values if not is_of_the_process(name)}

        def norms(rank: int, ranks: int, number: int, other_threads: bool) -> list[float]:
            self.start.restore()
            with self.by_itself(rank, ranks, other_threads), pretended_process(1000 + number):
                self.step.take_passes(one)
            return norms_of(self.step.take_gradients()).tolist()

        def near(some: list[float], others: list[float]) -> bool:
            a, b = torch.tensor(some), torch.tensor(others)
            return bool(((a - b).abs() <= self.limit * a.norm()).all())

        owns = [self.rank] if self.ranks > 1 else [0, 1]
        first, *others = (e for own in owns for e in self.gather(norms(own, max(2, self.ranks), own, own % 2 == 1)))
        if all(near(first, each) for each in others):
            alike = self.gather(near(norms(0, 0, 0, False), norms(0, 2, 0, False)))[0]
            return "" if alike else "the same samples give something else with another number of processes"
        everyone = self.gather(mine)
        if names := [name for name in mine if any(other.get(name) != mine[name] for other in everyone)]:
            return f"the processes hold different values of {names[0].removeprefix(LENGTH)}"
        alone = norms(0, 2, 0, False)
        tried = {"rank": (1, 2, 0, False), "process id": (0, 2, 1, False), "number of threads": (0, 2, 0, True)}
        what = next((what for what, other in tried.items() if not near(alone, norms(*other))), "")
        cause = f"something else with another {what}" if what else ELSEWHERE
        return f"the same samples give {self.gather(cause)[0]}"

    def _shared_out(self, batch: Batch, actual: Outcome) -> list[Finding]:
        """Parts of the micro-batches pass by themselves, each from the state in which its micro-batch found the model:
        the same parts on any number of ranks that is not large, so that all find the same."""
        ranges = self.ranges(batch)
        whole = micro_batches(ranges)
        self._first = [start for _, start, _ in whole]
        parts: list[list[Rows]] = [[] for _ in range(self.ranks)]
        self._takers, self._thorough = {}, self._second or self.checked in _THOROUGH
        single = self._closer
        number = 2 + single if self.ranks <= self._most else max(2, self.ranks - 1)
        for i, start, stop in whole:
            for k, (a, b) in enumerate(cuts := cut(start, stop, self.group(), number, single)):
                parts[(k + 1) % self.ranks].append((i, a, b))
                self._takers[i, a] = k, len(cuts)
        found = self._taken(batch, actual, ranges, parts, given=True)
        if self._thorough and 1 < self.ranks <= self._most:
            parts = [whole, *[[]] * (self.ranks - 1)]
            found += self._taken(batch, actual, ranges, parts, given=False)
        kinds = {each.what: each for each in reversed(self._everyones(found))}
        return [kinds[what] for what in KINDS if what in kinds]

    def _taken(
        self, batch: Batch, actual: Outcome, ranges: list[list[tuple[int, int]]], parts: list[list[Rows]], given: bool
    ) -> list[Finding]:
        """What this rank finds by parts that the ranks take, with the numbers of their micro-batches.

        `given`: batch norm's statistics are those of the whole micro-batch, which is not itself what passes.
        """
        states: list[States] = [[] for _ in batch.shards]
        shares, taken, error = self._exchanged(batch, ranges, parts), [], [""]
        try:
            taken = [self._passed(some, given, states) for some in (shares[:1], shares[1:])]
            error = _UNEVEN if self._uneven else error
        except UserError as refusal:
            error = [refusal.message, refusal.remedy]
        except Exception as failure:
            error = [f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"]
        errors = [each for each in self.gather(error) if each[0]]
        if error := min(errors, key=_UNEVEN.__eq__, default=[]):  # a run meets what else is said before it waits
            return self._failed(batch, *error)
        one, rest = taken
        other = self.summed(one + rest)
        if given and self.step.whole_batch:  # then a part has no loss of its own
            other.loss = actual.loss

        take, cheaper = partial(self._passed, shares, given, None), max(map(len, parts)) > 1

        def of_one(seed: int | None) -> tuple[Tensor, float]:
            return self.apart(one, self._passed(shares[:1], given, None, seed), other)

        def of_all(seed: int | None) -> tuple[Tensor, float]:
            return self.apart(other, self.summed(take(seed)))

        found = self.compared(batch, actual, other, [of_one] * cheaper + [of_all] * TRIES)
        if self.low and given and self._closer:
            own = self._exchanged(batch, ranges, [[(i, *rows) for i, rows in enumerate(each)] for each in ranges])
            # its places first: they don't follow what rounding hides
            found = [*self.compared_in_full(batch, partial(self._passed, own, given, None), take), *found]

        def once_more(seed: int | None = None) -> list[States]:
            found: list[States] = [[] for _ in batch.shards]
            self._passed(shares, given, found, seed)
            return found

        again = cache(once_more)
        others = self.of_loss() if self.step.whole_batch else set()  # which is called for the whole batch on any N
        for i, each in enumerate(states):
            after = self._before[i + 1] if i + 1 < len(self._before) else actual.state
            found += self._compared_buffers(batch, i, after, states, not given, again)
            for k, (_, state) in enumerate(each):
                names = self.kept_otherwise(after, state)
                if names and i == len(states) - 1 and self._left is None:
                    self._left = named(names[0]), after, state
                if names := [name for name in names if name not in others]:
                    left = self.matters(batch, names, after, state)
                    if left and left[0].what not in self._reported:
                        found.append(self.by_time(left[0], state, (once_more()[i][k][1] for _ in range(AGAIN))))
                    break
        for path, size in (self._notes.momenta if given and self._notes is not None else {}).items():
            found.append(Finding(batch.step, "buffer", f"{path}.running_mean".lstrip("."), size, _OTHERWISE))
        return found

    def _failed(self, batch: Batch, *error: str) -> list[Finding]:
        """What is to be said of parts whose passes failed."""
        self.step.take_gradients()
        if error[1:]:
            raise UserError(*error)
        if error[0].startswith("OutOfMemoryError"):  # from now on no rank takes more than about its share
            self._most = 1
            if self.rank == 0:
                warnings.warn(f"step {batch.step + 1} is not compared, for lack of memory: {error[0]}", stacklevel=9)
            return []
        if "once_differentiable" in error[0]:  # a gradient's gradient, through batch norm
            return []
        return [Finding(batch.step, "pass", "", math.inf, error[0])]

    def _exchanged(
        self, batch: Batch, have: list[list[tuple[int, int]]], want: list[list[Rows]]
    ) -> list[tuple[int, Batch]]:
        """This rank's parts of the batch if its ranks had other rows, with the numbers of their micro-batches."""
        rows = [[(start, stop) for _, start, stop in each] for each in want]
        images, labels = (exchange(values, have, rows, self.rank) for values in (batch.images, batch.labels))
        first, found = 0, []
        for i, start, stop in want[self.rank]:
            part, at = replace(batch.shards[i], rows=slice(start, stop)), slice(first, first + stop - start)
            first = at.stop
            if start < stop:
                found.append((i, replace(batch, images=images[at], labels=labels[at], shards=(part,))))
        return found

    def _passed(
        self,
        shares: list[tuple[int, Batch]],
        given: bool,
        states: list[States] | None,
        seed: int | None = None,
    ) -> Outcome:
        """Take parts: what comes of them together. `seed`: of a small change of their images."""
        step, sloped = self.step, given and self.step.whole_batch
        by = 0.0 if seed is None else self.moved_by * (-1) ** seed  # means go both ways
        total = Outcome([None] * len(step.named), torch.zeros(2, dtype=torch.float64), self.start)
        for i, one in shares:
            self._before[i].restore()
            if seed is not None:
                one = replace(one, images=self.shifted(one.images, seed))
            taker = self._takers.get((i, one.shards[0].rows.start), (0, 1)) if given else (0, 1)
            threads = self._thorough and taker[0] == taker[1] - 2  # of four parts a quarter: it may take twice as long
            with (
                self.by_itself(*taker, other_threads=threads),
                replaced(step, checks_mean=self.checked == 1 and not step.whole_batch),
                self._notes.given(i, by) if given and self._notes is not None else nullcontext(),
                self._sloped(one, i) if sloped else nullcontext(),
            ):
                found = step.take_passes(one)
            step.require_gradients()  # a process that has this part alone would have none either
            self._uneven |= given and self._notes is not None and self._notes.others
            loss = total.loss * 0 if sloped else self.loss(found, one.shards, everywhere=False)
            total += Outcome(step.take_gradients(), loss, self.start)
            if states is not None:
                states[i].append((one.shards[0].size, self.state()))
        return total

    def _sloped(self, batch: Batch, number: int) -> AbstractContextManager[None]:
        """Within, where the loss wants the whole batch, a part's brings its outputs the slopes that the whole's did."""
        rows = batch.shards[0].rows
        rows = slice(rows.start - self._first[number], rows.stop - self._first[number])

        def loss(outputs: Any, labels: Tensor) -> tuple[Tensor, None]:
            leaves = following(outputs, len(labels))
            slopes = [self._slopes.get((number, k)) for k in range(len(leaves))]  # of one that the loss left out: none
            parts = [
                (leaf * slope[rows]).sum() for leaf, slope in zip(leaves, slopes, strict=True) if slope is not None
            ]
            return torch.stack(parts).sum() * (batch.count / len(labels)), None

        return replaced(self.step, loss=loss, whole_batch=False)

    def _compared_buffers(
        self,
        batch: Batch,
        number: int,
        after: HiddenState,
        states: Sequence[States],
        normed: bool,
        again: Callable[[int | None], Sequence[States]],
    ) -> list[Finding]:
        """Where buffers put together from parts of micro-batch `number` are not those that the step has, by more than
        rounding: a mean of what a batch norm has centred is nothing else. `again`: the states by images that
        are moved, by a seed, or not."""
        joined = self._joined(number, after, states[number], normed)
        sizes = {name: moved_apart(*values) for name, values in joined.items()}

        def apart() -> list[str]:
            return [name for name, size in sizes.items() if size > min(_BUFFERS * self.limit, _FAR)]

        names = apart()
        if any(self.gather(names)) and self.learn_types(lambda: again(None)):
            names = apart()

        def noise(seed: int | None) -> dict[str, float]:
            found = self._joined(number, after, again(seed)[number], normed)
            return {n: moved_apart(v[0], v[-1], found[n][-1]) for n, v in joined.items() if n in found}

        if any(self.gather(names)) and batch.images.is_floating_point():
            moved, repeated = noise(batch.step), noise(None) if self.repeatable else {}
            names = [name for name in names if repeated.get(name) or sizes[name] > NOISE * moved.get(name, 0.0)]
        return [Finding(batch.step, "buffer", name, sizes[name], _OTHERWISE) for name in names]

    def _joined(
        self, number: int, after: HiddenState, states: States, normed: bool
    ) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Of the buffers that micro-batch `number` has moved: before it, after it, and put together from parts."""
        before, found = self._before[number], {}
        names = [name for name in self.buffer_names(normed) if name in before.values]
        others = [after, *(state for _, state in states)]
        mine = [name for name in names if not all(same(before.values[name], state.values[name]) for state in others)]
        moving = {name for each in self.gather(mine) for name in each}
        for name in (name for name in names if name in moving):
            start, here = (as_real(state.values[name].detach().cpu()) for state in (before, after))
            parts = [(count, as_real(state.values[name].detach().cpu())) for count, state in states]
            alike = all((v.shape, v.dtype) == (start.shape, start.dtype) for v in (here, *(v for _, v in parts)))
            if not all(self.gather(alike)):
                continue
            parts += [(0, start)] * (-(-_MOST // self.ranks) - len(parts))  # as many on each rank
            rows = torch.stack([value.reshape(-1) for _, value in parts])
            counts = torch.tensor([[count] for count, _ in parts])
            if self.ranks > 1:
                rows, counts = (all_rows(each, self.ranks) for each in (rows, counts))
            order = counts.flatten().argsort(descending=True, stable=True)  # one with samples comes first
            rows, counts, known = rows[order], counts[order], self._added.get(name, False)
            joined, self._added[name] = put_together(start.reshape(1, -1), rows, counts, known)
            found[name] = start, here, joined.view(start.shape)
        return found

    def _sharded(self, batch: Batch, actual: Outcome) -> list[Finding]:
        """FSDP: by moved boundaries, all ranks together, as its passes can't be taken alone."""
        step, ranges = self.step, self.ranges(batch)
        want = moved_boundaries(ranges, self.group())
        images, labels = (exchange(values, ranges, want, self.rank) for values in (batch.images, batch.labels))
        shards = [replace(shard, rows=slice(*want[self.rank][i])) for i, shard in enumerate(batch.shards)]
        new = replace(batch, images=images, labels=labels, shards=tuple(shards))

        def passed(which: Batch, seed: int | None) -> Outcome:
            self.start.restore()
            with step.sync.summed():
                moved = which if seed is None else replace(which, images=self.shifted(which.images, seed))
                found = step.take_passes(moved)
            return Outcome(step.take_gradients(), self.loss(found, which.shards), actual.state)

        other = passed(new, None)
        findings = self.compared(batch, actual, other, [lambda seed: self.apart(other, passed(new, seed))] * TRIES)
        if self.low and self._closer:
            findings = self.compared_in_full(batch, partial(passed, batch, None), partial(passed, new)) or findings
        return findings
