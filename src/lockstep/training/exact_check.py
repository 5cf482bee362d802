"""Exact mode's part of the self-check: the same slices one after the other, on other ranks, give the same bits."""

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from lockstep.data.loaders import Batch
from lockstep.data.order import Shard
from lockstep.distributed.world import pretended_process, pretended_rank
from lockstep.parallel.determinism import Collectives
from lockstep.parallel.hidden_state import LENGTH, HiddenState, differing, is_of_the_process, same
from lockstep.parallel.module_state import replaced
from lockstep.training.batch_rows import exchange
from lockstep.training.find_cause import ELSEWHERE
from lockstep.training.outcomes import AGAIN, HELD, UNREPEATED, Finding, Outcome
from lockstep.training.step_passes import StepPasses


def compare_slices(check: StepPasses, batch: Batch, actual: Outcome) -> list[Finding]:
    """What a step's slices make of the process that takes them, or of those before them. All ranks call it together,
    and find the same."""
    if check.ranks == 1 and check.checked == 1:
        _refuse_collectives(check, batch)
    drawing = [name for name in actual.state.generators if not is_of_the_process(name)]
    if any(check.gather(drawing)):  # by luck slices may draw the same: where do those leave them that begin later?
        _taken(check, batch, start=actual.state.restore)
        values, ends = check.state().values, actual.state.values
        if name := _first(check, *(name for name in drawing if not same(values.get(name), ends[name]))):
            return [Finding(batch.step, "generator", name, math.inf, HELD)]
    if (before := check.evaluated) is not None:
        after = _taken(check, batch, apart=False, start=lambda: [*map(HiddenState.restore, (check.start, before))])
        names = check.left_by_evaluation(check.start) if check.other_bits(actual.gradients, after) else []
        if name := _first(check, *names):
            return [Finding(batch.step, "bits", name, 0.0, "a slice follows what one process evaluated")]
    elsewhere = _rotated(check, batch) if check.ranks > 1 else batch
    found = _taken(check, elsewhere, elsewhere=True)
    if not (place := _first(check, check.other_bits(actual.gradients, found))):
        return []
    for _ in range(AGAIN):
        if moves := _first(check, check.other_bits(found, _taken(check, elsewhere, elsewhere=True))):
            return [Finding(batch.step, "bits", moves, 0.0, UNREPEATED)]
    inside = _taken(check, batch, apart=False)
    if copies := _first(check, check.other_bits(actual.gradients, inside)):
        actual.gradients, actual.state = inside, check.state()
        if not _first(check, check.other_bits(inside, _taken(check, elsewhere))):
            cause = "the copies for threads compute otherwise than the model; from now on there are none"
            return [Finding(batch.step, "bits", copies, 0.0, cause)]
    if not _first(check, check.other_bits(actual.gradients, _taken(check, batch))):
        return [Finding(batch.step, "bits", place, 0.0, f"the same slice gives {ELSEWHERE}")]
    own = {*check.step.named, *(name for name, _ in check.bare.named_buffers())}
    kept = [name for name in differing(check.start, actual.state) if not (name in own or is_of_the_process(name))]
    by = f", by {name.removeprefix(LENGTH)}" if (name := _first(check, *kept)) else ""
    return [Finding(batch.step, "bits", place, 0.0, f"what a slice gives depends on the slices before it{by}")]


def _first(check: StepPasses, *names: str) -> str:
    """The first name that a rank has, "" where none has any."""
    return next(filter(None, check.gather(next(iter(names), ""))), "")


def _taken(
    check: StepPasses,
    some: Batch,
    apart: bool = True,
    elsewhere: bool = False,
    start: Callable[[], object] | None = None,
) -> list[Tensor | None]:
    """The gradients of all ranks' slices, taken one after the other; all ranks call it together.

    Args:
        apart: each slice begins in the state before the step, not where the one before has left it.
        elsewhere: each process finds itself another one, among another number of them: one of two, or alone.
        start: what puts back the state in which they begin; without it the one before the step.
    """
    step, start = check.step, start or check.start.restore
    another = check.gather(os.getpid())[(check.rank + 1) % check.ranks] ^ 1  # not the process that had the slices
    start()
    step.sync.sequential, step.sync.overlap = True, False  # the check puts them back; nothing is sent before `finish`
    before_pass = (lambda _: start()) if apart else None
    with ExitStack() as there, replaced(step, before_pass=before_pass):
        if elsewhere:
            there.enter_context(pretended_rank(*((1, 2) if check.ranks == 1 else (0, 0))))
            there.enter_context(pretended_process(another))
        step.take_passes(some)
    step.sync.finish()
    return step.take_gradients()


def _rotated(check: StepPasses, batch: Batch) -> Batch:
    """The next rank's slices."""
    ranges = check.ranges(batch)
    tables = check.gather([[shard.micro, shard.key, shard.members] for shard in batch.shards])
    want, theirs = [*ranges[1:], ranges[0]], tables[(check.rank + 1) % check.ranks]
    images, labels = (exchange(values, ranges, want, check.rank) for values in (batch.images, batch.labels))
    shards = [Shard(micro, key, slice(*r), n) for (micro, key, n), r in zip(theirs, want[check.rank], strict=True)]
    return replace(batch, images=images, labels=labels, shards=tuple(shards))


def _refuse_collectives(check: StepPasses, batch: Batch) -> None:
    """Raise UserError for a model that calls a collective where it finds itself one of two, as exact mode does."""
    # no backward pass: the slices' hooks would take its gradients
    with check.by_itself(0, 2), Collectives(refused=True):
        check.bare(batch.images[: batch.shards[0].size])
