"""Findings about a run that was stopped after an epoch and resumed, beside one that went on."""

from collections.abc import Iterator

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import Finding, times
from lockstep.commands.audit.records import Reading, Record, of, trainings


def anew(records: list[Record], others: list[Record]) -> Iterator[Finding]:
    """LS404: the optimizer or the rate begins anew. LS407: the epochs do.

    Of runs whose weights go on bit by bit: what else a script may load is no resumption.
    """
    again = next((each for each in others if each.way == "resumed"), None)
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
