"""Whether N processes train the weights that one does, up to rounding."""

import math
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import APART, Finding
from lockstep.commands.audit.records import Record, of, trainings

_ROUNDING = 1e-4  # of a tensor's norm: float32's sums in another order stay well below in the first steps


def apart(records: list[Record]) -> Iterator[Finding]:
    """LS501, or a note where batch norm over each process's share is the reason."""
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
        wraps = [each for each in of(record.first, "wrap") if each["kind"] == "ddp"]
        if any(each["batch_norms"] for each in wraps):
            says += f": batch norm takes the statistics of each of {record.world} shares of a batch"
            yield Finding(APART, at, says, record.nproc, note=True)
        else:
            yield Finding(APART, at, f"{says}, from the same samples at the same rate", record.nproc)


def _draws(record: Record) -> bool:
    """Whether anything random enters the first steps: then N changes the numbers by right."""
    every = [*record.ranks.values(), *record.others.values()]
    return any(each["drew"] for events in every for each in of(events, "draw"))


def _first_difference(one: Record, other: Record) -> tuple[int, str, str] | None:
    """(step, tensor, line) of the first difference, while both take the same samples at the same rates."""
    mine, theirs = _batches(one), _batches(other)
    steps = zip(of(one.first, "step"), of(other.first, "step"), mine, theirs, strict=False)
    for number, (a, b, ids, others) in enumerate(steps):
        if not a.get("weights") or not b.get("weights") or sorted(ids) != sorted(others) or not ids:
            return None
        if a["lr"] != b["lr"] or a["weights"].keys() != b["weights"].keys():
            return None
        for name, (total, norm) in a["weights"].items():
            there_total, there_norm = b["weights"][name]
            allowed = _ROUNDING * max(norm, there_norm) + 1e-7
            far = abs(norm - there_norm) > allowed or abs(total - there_total) > allowed * math.sqrt(2 + norm)
            if far:
                return number, name, b["at"]
    return None


def _batches(record: Record) -> list[list[int]]:
    """The samples of each optimizer step in the first training pass, over all ranks."""
    ranks = [_own(events) for events in record.ranks.values()]
    return [[each for part in now for each in part] for now in zip(*ranks, strict=False)]


def _own(events: list[Event]) -> list[list[int]]:
    reading = next(iter(trainings(events)), None)
    found: list[list[int]] = [[]]
    for each in of(reading.events if reading else (), "batch", "step"):
        if each["event"] == "batch" and reading and each["loader"] == reading.loader.get("loader"):
            found[-1] += each["ids"] or []
        elif each["event"] == "step":
            found.append([])
    return found[:-1]
