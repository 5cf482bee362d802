"""Findings about the numbers that a script prints, and what its decisions are made by."""

import itertools
import re
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.faults import Finding, times
from lockstep.commands.audit.records import Reading, Record, evaluations, of, trainings

_NUMBER = re.compile(r"(?<![\w.])\d+\.(\d+)(?![\w.])")
_DIGITS = 4  # of a number, without which it may be another one's
_OWN = re.compile(r"\brank|\bgpu|\blocal|\bproc", re.IGNORECASE)  # a line that says whose number it tells


def unreduced(records: list[Record]) -> Iterator[Finding]:
    """LS204: a rank's own training loss is printed. LS206: after it was reduced, and the result dropped."""
    for record in _several(records):
        for place, reading in enumerate(trainings(record.first)):
            losses = _losses(record, reading, place, trainings)
            if len(losses) < record.world or len(losses[0]) < 2 or not _apart(record, reading, place):
                continue
            own, every = _means(losses[:1]), _means(losses)
            for each, text in _printed_numbers(record, reading):
                if not (_is_among(text, own) and not _is_among(text, every)):
                    continue
                count = sum(size for _, size in losses[0])
                says = (
                    f"{text} is the mean over rank 0's {times(count, 'sample')}; over all "
                    f"{sum(size for part in losses for _, size in part):,} it is {every[0]:.{len(text.split('.')[1])}f}"
                )
                dropped = _was_reduced(record, reading, each, own)
                kind = f", and the all_reduce at {dropped} has had it" if dropped else ""
                yield Finding("LS206" if dropped else "LS204", each["at"], says + kind, record.nproc)


def means_of_means(records: list[Record]) -> Iterator[Finding]:
    """LS203: a mean of the batches' means is printed, where the batches are unequal."""
    for record in _several(records):
        for kind in (trainings, evaluations):
            for place, reading in enumerate(kind(record.first)):
                losses = _losses(record, reading, place, kind)
                if len(losses) < record.world or not _unequal(record, reading):
                    continue
                right, means = _means(losses)
                for each, text in _printed_numbers(record, reading):
                    if _is_among(text, (means,)) and not _is_among(text, (right, _means(losses[:1])[0])):
                        says = (
                            f"{text} is the mean of {times(sum(map(len, losses)), 'batch mean')}, the last ones of "
                            f"{losses[0][-1][1]} samples instead of {losses[0][0][1]}: the samples' mean is "
                            f"{right:.{len(text.split('.')[1])}f}"
                        )
                        yield Finding("LS203", each["at"], says, record.nproc)


def _several(records: list[Record]) -> list[Record]:
    return [each for each in records if each.world > 1]


def _losses(record: Record, reading: Reading, place: int, kind: type | object) -> list[list[tuple[float, int]]]:
    """The losses and samples of the same pass's batches, by rank; fewer ranks where a pass can't be compared."""
    found = []
    for events in record.ranks.values():
        passes = kind(events)  # type: ignore[operator]
        same = passes[place] if reading.whole and place < len(passes) else None
        if same is None or same.loader.get("dataset") != reading.loader.get("dataset"):
            return []
        losses = of(same.events, "loss")
        if len(losses) != len(same.batches) or not losses:
            return []
        found.append([(float(each["value"]), int(each["size"])) for each in losses])
    return found


def _means(losses: list[list[tuple[float, int]]]) -> tuple[float, float]:
    """The mean over samples, and that of the ranks' means of their batches' means."""
    every = [each for part in losses for each in part]
    unweighted = [sum(value for value, _ in part) / len(part) for part in losses]
    return sum(value * size for value, size in every) / sum(size for _, size in every), sum(unweighted) / len(losses)


def _apart(record: Record, reading: Reading, place: int) -> bool:
    """Whether the ranks read different samples."""
    others = [trainings(events)[place].ids for events in list(record.ranks.values())[1:]]
    return bool(reading.ids) and any(set(each) != set(reading.ids) for each in others)


def _unequal(record: Record, reading: Reading) -> bool:
    """Whether the last batch of a rank is shorter, here and in the set as it is."""
    loader, sizes = reading.loader, [each["size"] for each in reading.batches]
    full, batch = loader.get("unshortened"), loader.get("batch_size")
    if not full or not batch or len(sizes) < 2 or None in sizes or sizes[-1] == sizes[0]:
        return False
    return bool((-(-full // record.world) if loader.get("replicas") else full) % batch)


def _printed_numbers(record: Record, reading: Reading) -> Iterator[tuple[Event, str]]:
    """The numbers that rank 0 alone prints after a pass and before it trains again."""
    events = record.first
    begin = next(i for i, each in enumerate(events) if each is reading.events[-1]) + 1
    trains = (i for i, each in enumerate(events) if i > begin and each["event"] == "backward")
    others = {each["at"] for other in list(record.ranks.values())[1:] for each in of(other, "printed")}
    for each in of(events[begin : next(trains, len(events))], "printed"):
        if each["at"] not in others and not _OWN.search(each["text"]):
            yield from ((each, found[0]) for found in _NUMBER.finditer(each["text"]))


def _is_among(text: str, values: tuple[float, ...]) -> bool:
    """Whether a number as it was written is one of these, rounded."""
    decimals = len(text.partition(".")[2])
    if len(text.replace(".", "").lstrip("0")) < _DIGITS:
        return False
    return any(abs(float(text) - each) <= 0.5001 * 10**-decimals for each in values)


def _was_reduced(record: Record, reading: Reading, line: Event, own: tuple[float, ...]) -> str:
    """The line at which rank 0 handed its own mean to an all_reduce before it printed it; "" for none."""
    events = record.first
    begin = next(i for i, each in enumerate(events) if each is reading.events[0])
    until = itertools.takewhile(lambda each: each is not line, events[begin:])
    for each in of(until, "collective"):
        if any(abs(value - mean) <= 1e-5 * abs(mean) for value in each.get("values") or () for mean in own):
            return str(each["at"])
    return ""


def plateaus(records: list[Record]) -> Iterator[Finding]:
    """LS205: the ranks' ReduceLROnPlateau get numbers of their own."""
    for record in _several(records):
        given = [[each for each in of(events, "scheduler") if "metric" in each] for events in record.ranks.values()]
        for now in zip(*given, strict=False):
            metrics = [each["metric"] for each in now]
            if len(now) > 1 and max(metrics) - min(metrics) > 1e-5 * abs(max(metrics)):
                says = (
                    f"ReduceLROnPlateau gets {metrics[0]:.6g} on rank 0 and {metrics[1]:.6g} on rank 1: each lowers "
                    "its rate by a number of its own"
                )
                yield Finding("LS205", now[0]["at"], says, record.nproc)
                break
