"""Whether N processes train the weights that one does, up to rounding."""

import math
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import APART, Finding
from lockstep.commands.audit.records import Record, of, trainings

_ROUNDING = 1e-4  # of a tensor's norm: float32's sums in another order stay well below in the first steps


def apart(records: list[Record]) -> Iterator[Finding]:
    """LS501; LS212 where FSDP joins unequal models, LS203 where the ranks have unequal shares of that step.

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
        shares = _shares(record)
        before, now = shares[:step], shares[step] if step < len(shares) else []
        if step and len(set(now)) > 1 and all(len(set(each)) == 1 for each in before):
            says += (
                f", in which the ranks have {' and '.join(map(str, sorted(set(now), reverse=True)))} samples: the mean "
                "of their means is not the samples' mean"
            )
            yield Finding("LS203", at, says, record.nproc)
            continue
        if cut := next(_cut_apart(record), None) if step == 0 else None:
            says = (
                f"each of {record.world} ranks has drawn initial weights of its own, and FSDP joins a part of each: "
                f"after the first step {name} is not that of N = 1"
            )
            yield Finding("LS212", cut["at"], says, record.nproc)
            continue
        wraps = [each for each in of(record.first, "wrap") if each["kind"] in ("ddp", "fsdp")]
        if any(each["batch_norms"] for each in wraps):
            says += f": batch norm takes the statistics of each of {record.world} shares of a batch"
            yield Finding(APART, at, says, record.nproc, note=True)
        else:
            yield Finding(APART, at, f"{says}, from the same samples at the same rate", record.nproc)


def _cut_apart(record: Record) -> Iterator[Event]:
    """Where FSDP has cut weights that were not the same on all ranks."""
    wraps = ([each for each in of(events, "wrap") if each["kind"] == "fsdp"] for events in record.ranks.values())
    return (now[0] for now in zip(*wraps, strict=False) if len({each["begun"] for each in now}) > 1)


def _draws(record: Record) -> bool:
    """Whether anything random enters the first steps: then N changes the numbers by right."""
    every = [*record.ranks.values(), *record.others.values()]
    return any(each["drew"] for events in every for each in of(events, "draw"))


def _first_difference(one: Record, other: Record) -> tuple[int, str, str] | None:
    """(step, tensor, line) of the first difference, while both take the same samples at the same rates."""
    steps = zip(_steps(one), _steps(other), _batches(one), _batches(other), strict=False)
    for number, ((a, mine), (b, theirs), ids, others) in enumerate(steps):
        if not mine or not theirs or sorted(ids) != sorted(others) or not ids:
            return None
        if a["lr"] != b["lr"] or mine.keys() != theirs.keys():
            return None
        for name, (total, norm) in mine.items():
            there_total, there_norm = theirs[name]
            allowed = _ROUNDING * max(norm, there_norm) + 1e-7
            far = abs(norm - there_norm) > allowed or abs(total - there_total) > allowed * math.sqrt(2 + norm)
            if far:
                return number, name, b["at"]
    return None


def _steps(record: Record) -> Iterator[tuple[Event, dict[str, tuple[float, float]]]]:
    """The lowest rank's steps, each with the sums and norms of the weights after it; of shards those of the whole."""
    ranks = list(record.ranks.values())
    for now in zip(*(of(events, "step") for events in ranks), strict=False):
        first, parts = now[0], [each.get("shards") or {} for each in now]
        whole = {name: (total, norm) for name, (total, norm) in (first.get("weights") or {}).items()}
        for name, (*_, cut) in parts[0].items() if all(each.keys() == parts[0].keys() for each in parts) else ():
            copies = len(ranks) / cut
            total, squares = sum(each[name][0] for each in parts), sum(each[name][1] ** 2 for each in parts)
            whole[name] = total / copies, math.sqrt(squares / copies)
        yield first, whole


def _batches(record: Record) -> list[list[int]]:
    """The samples of each optimizer step in the first training pass, over all ranks."""
    ranks = [_own(events) for events in record.ranks.values()]
    return [[each for part in now for each in part] for now in zip(*ranks, strict=False)]


def _shares(record: Record) -> list[list[int]]:
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
