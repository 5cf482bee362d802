"""Findings about weights: whether N processes train those of one, and a resumed run those of one that went on."""

import math
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.faults import APART, Finding, times
from lockstep.commands.audit.records import Reading, Record, of, trainings

_ROUNDING = 1e-4  # of a tensor's norm: float32's sums in another order stay well below in the first steps


def apart(records: list[Record]) -> Iterator[Finding]:
    """LS501; LS203 where the ranks have unequal batches in that step.

    A note where batch norm takes them apart.
    """
    one = next((each for each in records if each.world == 1), None)
    if one is None or _draws(one):
        return
    for record in records:
        if record.world == 1 or _draws(record):
            continue
        found = _first_difference(one, record)
        if found is None:
            continue
        step, name, at = found
        says = f"weights differ from N = 1 beyond rounding from step {step + 1}, first in {name}"
        sizes = _batch_sizes(record)
        before, now = sizes[:step], sizes[step] if step < len(sizes) else []
        if len(set(now)) > 1 and all(len(set(each)) == 1 for each in before):
            says += (
                f", in which the ranks have {' and '.join(map(str, sorted(set(now), reverse=True)))} samples: the mean "
                "of their means is not the samples' mean"
            )
            yield Finding("LS203", at, says, record.nproc)
            continue
        wraps = [each for each in of(record.first, "wrap") if each["kind"] == "ddp"]
        if any(each["batch_norms"] for each in wraps):
            says += f": batch norm takes the statistics of each of {record.world} ranks' batches"
            yield Finding(APART, at, says, record.nproc, note=True)
        else:
            yield Finding(APART, at, f"{says}, from the same samples at the same rate", record.nproc)


def _draws(record: Record) -> bool:
    """Whether anything random enters the first steps: then N changes the numbers by right."""
    every = [*record.ranks.values(), *record.others.values()]
    return any(each["drew"] for events in every for each in of(events, "draw"))


def _first_difference(one: Record, other: Record) -> tuple[int, str, str] | None:
    """(step, tensor, line) of the first difference, while both take the same samples at the same rates."""
    steps = zip(of(one.first, "step"), of(other.first, "step"), _batches(one), _batches(other), strict=False)
    for number, (a, b, ids, others) in enumerate(steps):
        mine, theirs = a.get("weights") or {}, b.get("weights") or {}
        if not mine or not ids or sorted(ids) != sorted(others):
            return None
        if a["lr"] != b["lr"] or mine.keys() != theirs.keys():
            return None
        for name, (total, norm) in mine.items():
            other_total, other_norm = theirs[name]
            allowed = _ROUNDING * max(norm, other_norm) + 1e-7
            far = abs(norm - other_norm) > allowed or abs(total - other_total) > allowed * math.sqrt(2 + norm)
            if far:
                return number, name, b["at"]
    return None


def _batches(record: Record) -> list[list[int]]:
    """The samples of each optimizer step in the first training pass, over all ranks."""
    ranks = [_own(events) for events in record.ranks.values()]
    return [[each for part in now for each in part] for now in zip(*ranks, strict=False)]


def _batch_sizes(record: Record) -> list[list[int]]:
    """How many samples each rank has in each step of the first training pass."""
    ranks = [_own(events) for events in record.ranks.values()]
    return [[len(part) for part in now] for now in zip(*ranks, strict=False)]


def _own(events: list[Event]) -> list[list[int]]:
    reading = next(iter(trainings(events)), None)
    found: list[list[int]] = [[]]
    for each in of(reading.events if reading else (), "batch", "step"):
        if each["event"] == "batch" and reading and each["loader"] == reading.loader.get("loader"):
            found[-1] += each["ids"] or []
        elif each["event"] == "step":
            found.append([])
    return found[:-1]


def resumed(records: list[Record], others: list[Record]) -> Iterator[Finding]:
    """LS404: the optimizer or the rate begins again. LS407: the epochs do.

    Of runs whose weights go on bit by bit: what else a script may load is no resumption.
    """
    again = next((each for each in others if each.purpose == "resumed"), None)
    whole = next((each for each in records if again is not None and each.nproc == again.nproc), None)
    loaded = next(iter(of(again.first, "loaded")), None) if again else None
    if whole is None or again is None or loaded is None:
        return
    passes, resumed = trainings(whole.first), trainings(again.first)
    if len(passes) < 2 or not resumed or again.first.index(loaded) > again.first.index(resumed[0].events[0]):
        return
    first, second, mine = _begin(passes[0]), _begin(passes[1]), _begin(resumed[0])
    if not first or not second or not mine or not second.get("begun") or second["begun"] != mine.get("begun"):
        return
    head = f"resumed from {loaded['path']} after epoch 1,"
    reasons = []
    if passes[0].epoch != passes[1].epoch and resumed[0].epoch == passes[0].epoch is not None:
        says = f"{head} it has epoch {passes[0].epoch} again, where the uninterrupted run has epoch {passes[1].epoch}"
        yield Finding("LS407", loaded["at"], f"{says}{_order(passes, resumed[0])}", again.nproc)
    elif mine["lr"] != second["lr"]:
        reasons.append(f"the rate is {mine['lr'][0]:g} instead of {second['lr'][0]:g}")
    if second.get("state") and not mine.get("state"):
        reasons.append(f"the optimizer has nothing instead of {times(second['state'], 'tensor')} of earlier steps")
    if reasons:
        yield Finding("LS404", loaded["at"], f"{head} {' and '.join(reasons)}", again.nproc)


def _begin(reading: Reading) -> Event | None:
    return next(iter(of(reading.events, "step")), None)


def _order(passes: list[Reading], mine: Reading) -> str:
    alike = mine.ids and mine.ids == passes[0].ids != passes[1].ids
    return f": the same {times(len(mine.ids), 'sample')} in the same order once more" if alike else ""
