"""Findings about who reads which samples in training, and what is evaluated, by whom, in which mode."""

import itertools
from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.faults import Finding, times
from lockstep.commands.audit.records import Reading, Record, evaluations, of, trainings


def repeated(records: list[Record]) -> Iterator[Finding]:
    """LS101: two epochs' orders are one, where processes split a shuffled order."""
    for record in records:
        for first, second in itertools.pairwise(each for each in trainings(record.first) if each.whole and each.ids):
            alike = first.ids == second.ids and first.loader["loader"] == second.loader["loader"]
            if alike and not first.ascending and (second.loader["replicas"] or _split(record, first)):
                number, before = second.number + 1, first.number + 1
                says = f"epoch {number} had epoch {before}'s order: all {times(len(first.ids), 'sample')} of rank 0"
                yield Finding("LS101", second.at, says, record.nproc)
                break


def _split(record: Record, own_pass: Reading) -> bool:
    """Whether other ranks read other samples in this pass: a sampler of the script's own, with epochs, deals them."""
    if own_pass.epoch is None:
        return False
    others = [each for events in list(record.ranks.values())[1:] for each in trainings(events)]
    same = [set(each.ids) for each in others if each.number == own_pass.number and each.ids]
    return bool(same) and not any(ids & set(own_pass.ids) for ids in same)


def misaligned(records: list[Record]) -> Iterator[Finding]:
    """LS102: the sampler draws indices of a set of another length than the loader's."""
    for record in records:
        for each in trainings(record.first) + evaluations(record.first):
            if each.loader.get("aligned") is False:
                drawn, length = each.loader["sampled"], each.loader["length"]
                largest = max(each.ids, default=0)
                says = (
                    f"the sampler's set has {times(drawn, 'sample')} and the loader's {length:,}: "
                    f"no index above {largest:,} was read"
                )
                yield Finding("LS102", each.at, says, record.nproc)


def split_apart(records: list[Record]) -> Iterator[Finding]:
    """LS212: the ranks drew different splits, or cut their parts from different orders."""
    for record in records:
        passes = [next((each for each in trainings(events) if each.whole), None) for events in record.ranks.values()]
        whole = [each for each in passes if each is not None and each.ids]
        if len(whole) < 2 or len(whole) < record.world:
            continue
        together, read = len(set().union(*(each.ids for each in whole))), sum(len(each.ids) for each in whole)
        length, full = whole[0].loader["length"], whole[0].loader["full"]
        alike = all(each.loader["length"] == length for each in whole)
        once = all(len(set(each.ids)) == len(each.ids) for each in whole)  # else drawn with replacement, on purpose
        if whole[0].loader["replicas"] and together > length and alike:
            says = (
                f"{record.world} ranks trained on {together:,} different samples of a set of {length:,}: "
                "each has drawn a split of its own"
            )
            yield Finding("LS212", whole[0].at, says, record.nproc)
        elif once and not whole[0].loader["replicas"] and abs(read - full) < record.world and together < 0.98 * full:
            says = (
                f"{record.world} ranks read {read:,} samples of a set of {full:,}, and {full - together:,} of it "
                "never: each has cut its part from an order of its own"
            )
            yield Finding("LS212", whole[0].at, says, record.nproc)


def begun_apart(records: list[Record]) -> Iterator[Finding]:
    """LS212: the ranks' weights differ, although their gradients are the same."""
    for record in records:
        if record.world < 2 or any(of(events, "wrap") for events in record.ranks.values()):
            continue
        first = [next(iter(of(events, "step")), None) for events in record.ranks.values()]
        steps = [each for each in first if each is not None and each.get("weights")]
        if len(steps) < 2 or len({str(each["grads"]) for each in steps}) > 1:
            continue
        apart = [name for name in steps[0]["weights"] if len({str(each["weights"].get(name)) for each in steps}) > 1]
        if apart:
            says = (
                f"the weights of {record.world} ranks differ after the first step by equal gradients, first in "
                f"{apart[0]}: each rank has drawn initial weights of its own"
            )
            yield Finding("LS212", steps[0]["at"], says, record.nproc)


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
        for place, own_pass in enumerate(evaluations(record.first)):
            others = [each for rank in list(record.ranks)[1:] if (each := _same(record, rank, own_pass, place))]
            everybody = [own_pass, *others]
            union = len(set().union(*(each.ids for each in everybody)))
            own, total = len(set(own_pass.ids)), sum(len(each.ids) for each in everybody)
            if not own or own == union or not all(each.whole for each in everybody):
                continue
            exchanged = _exchanges(record.first, own_pass)
            if not exchanged:
                says = (
                    f"rank 0 evaluated {own:,} of {times(union, 'image')}{_at_full_size(own_pass, own, union)}, "
                    "and no collective brings the ranks' results together"
                )
                yield Finding("LS104", own_pass.at, says, record.nproc)
            elif total > union and not any(each["op"] in _GATHERS for each in exchanged):
                says = (
                    f"{record.world} ranks evaluated {times(total, 'image')} of a set of {union:,}: "
                    f"padding counts {total - union:,} of them twice"
                )
                yield Finding("LS105", own_pass.at, says, record.nproc)


def _same(record: Record, rank: int, own_pass: Reading, place: int) -> Reading | None:
    """The same evaluation on another rank."""
    others = evaluations(record.ranks[rank])
    found = others[place] if place < len(others) else None
    return found if found and found.loader.get("dataset") == own_pass.loader.get("dataset") else None


def _exchanges(events: list[Event], reading: Reading) -> list[Event]:
    """The collectives that bring results together, from an evaluation's begin to the next training step."""
    begin = next(i for i, each in enumerate(events) if each is reading.events[0])
    after = events[begin + len(reading.events) :]
    trains = (i for i, each in enumerate(after) if each["event"] == "forward" and each["grad"] and each["training"])
    end = next(trains, len(after))
    exchanged = of([*reading.events, *after[:end]], "collective")
    return [each for each in exchanged if each["op"] in _GATHERS + _REDUCES]


def _at_full_size(reading: Reading, own: int, union: int) -> str:
    """The same in the set as it is, where the audit shortened it."""
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
