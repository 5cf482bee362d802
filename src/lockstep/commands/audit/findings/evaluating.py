"""Findings about what was evaluated, by whom, and in which mode."""

from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Reading, Record, evaluations, of, trainings

_GATHERS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("gather", "gather_into_tensor", "gather_single", "gather_object"),
)
_REDUCES = (
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single"),
)


def parts(records: list[Record]) -> Iterator[Finding]:
    """LS104: rank 0 evaluated its part, and nothing brings the parts together. LS105: padding is among the sums."""
    for record in records:
        if record.world < 2:
            continue
        for place, mine in enumerate(evaluations(record.first)):
            theirs = [each for rank in list(record.ranks)[1:] if (each := _same(record, rank, mine, place))]
            everybody = [mine, *theirs]
            union = len(set().union(*(each.ids for each in everybody)))
            own, total = len(set(mine.ids)), sum(len(each.ids) for each in everybody)
            if not own or own == union or not all(each.whole for each in everybody):
                continue
            said = _said(record.first, mine)
            if not said:
                says = (
                    f"rank 0 evaluated {own:,} of {times(union, 'image')}{_at_full_size(mine, own, union)}, "
                    "and no collective brings the ranks' results together"
                )
                yield Finding("LS104", mine.at, says, record.nproc)
            elif total > union and not any(each["op"] in _GATHERS for each in said):
                says = (
                    f"{record.world} ranks evaluated {times(total, 'image')} of a set of {union:,}: "
                    f"padding counts {total - union:,} of them twice"
                )
                yield Finding("LS105", mine.at, says, record.nproc)


def _same(record: Record, rank: int, mine: Reading, place: int) -> Reading | None:
    """The same evaluation on another rank."""
    others = evaluations(record.ranks[rank])
    found = others[place] if place < len(others) else None
    return found if found and found.loader.get("dataset") == mine.loader.get("dataset") else None


def _said(events: list[Event], reading: Reading) -> list[Event]:
    """The collectives that bring results together, from an evaluation's begin to the next training step."""
    begin = next(i for i, each in enumerate(events) if each is reading.events[0])
    after = events[begin + len(reading.events) :]
    trains = (i for i, each in enumerate(after) if each["event"] == "forward" and each["grad"] and each["training"])
    end = next(trains, len(after))
    said = of([*reading.events, *after[:end]], "collective")
    return [each for each in said if each["op"] in _GATHERS + _REDUCES]


def _at_full_size(reading: Reading, own: int, union: int) -> str:
    """The same in the set as it is, where the audit made it small."""
    full = reading.loader.get("unshortened") or 0
    return f" (of the whole set: {round(own / union * full):,} of {full:,})" if full > union else ""


def training_set(records: list[Record]) -> Iterator[Finding]:
    """LS106: all that is evaluated is trained on."""
    for record in records:
        trained, tested = trainings(record.first), [each for each in evaluations(record.first) if each.ids]
        if not trained or not tested:
            continue
        sets = {each.loader.get("dataset") for each in trained}
        seen = {each for reading in trained for events in [reading.ids] for each in events}
        for events in list(record.ranks.values())[1:]:
            seen |= {each for reading in trainings(events) for each in reading.ids}
        if all(each.loader.get("dataset") in sets and seen.issuperset(each.ids) for each in tested):
            count = len(set(tested[0].ids))
            says = f"all {times(count, 'image')} that rank 0 evaluated are among the {len(seen):,} that were trained on"
            yield Finding("LS106", tested[0].at, says, record.nproc)


def modes(records: list[Record]) -> Iterator[Finding]:
    """LS214: evaluated in training mode. LS215: trained in evaluation mode after an evaluation."""
    for record in records:
        for reading in evaluations(record.first):
            passes = [each for each in of(reading.events, "forward") if each["modal"]]
            if passes and all(each["training"] for each in passes):
                count = sum(each["size"] or 0 for each in passes)
                says = f"{times(count, 'image')} were evaluated in training mode, with dropout or batch norm at work"
                yield Finding("LS214", passes[0]["at"], says, record.nproc)
        began = None
        for reading in trainings(record.first):
            passes = [each for each in of(reading.events, "forward") if each["modal"] and each["grad"]]
            if not passes:
                continue
            if began is None:
                began = passes[0]["training"]
            quiet = [each for each in passes if not each["training"]]
            if began and quiet and reading.number:
                says = f"epoch {reading.number + 1} trained in evaluation mode, {len(quiet)} of {len(passes)} passes"
                yield Finding("LS215", quiet[0]["at"], says, record.nproc)
                break
