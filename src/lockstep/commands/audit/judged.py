"""What becomes of lint's findings when the script has run: confirmed, withdrawn, or not observed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings.finding import Finding
from lockstep.commands.audit.records import Record, evaluations, of, trainings
from lockstep.commands.lint import rule as lint
from lockstep.commands.lint.check import check


@dataclass(frozen=True)
class Judged:
    """A finding of lint's, and "confirmed", "withdrawn" or "not observed"."""

    finding: lint.Finding
    verdict: str


def judged(script: Path, found: list[Finding], records: list[Record], others: Sequence[Record] = ()) -> list[Judged]:
    """Lint's findings in the script, each with what the runs say of it."""
    static, _ = check([script], frozenset(lint.RULES))
    return [Judged(each, _verdict(each, found, records, others)) for each in static]


def _verdict(static: lint.Finding, found: list[Finding], records: list[Record], others: Sequence[Record]) -> str:
    if any(each.code in (static.code, *_SHOWN_BY.get(static.code, ())) for each in found):
        return "confirmed"
    several = [each for each in records if each.world > 1 and each.ended in ("done", "cut")]
    seen = _SEEN.get(static.code)
    if seen and any(seen(each) for each in several):
        return "withdrawn"
    way = _WAYS.get(static.code)
    return "withdrawn" if way and any(each.way == way and each.ended == "done" for each in others) else "not observed"


def _events(record: Record, kind: str) -> bool:
    return any(of(events, kind) for events in record.ranks.values())


def _files(record: Record, kind: str) -> set[str]:
    return {each["path"] for events in record.ranks.values() for each in of(events, kind) if each["path"]}


def _normalised(events: list[Event]) -> bool:
    return bool(of(events, "normalised"))


def _metered(record: Record) -> bool:
    return any("metric" in each for each in of(record.first, "scheduler"))


def _summed_up(record: Record) -> bool:
    """Whether numbers of all ranks were told after a pass, from losses that were seen."""
    return _events(record, "told") and _events(record, "reduced") and _trained(1)(record)


def _trained(least: int) -> Callable[[Record], bool]:
    return lambda record: sum(each.whole for each in trainings(record.first)) >= least


def _evaluated(record: Record) -> bool:
    return any(each.whole and each.ids for each in evaluations(record.first))


def _uneven(record: Record) -> bool:
    return any(each.whole and each.ids and each.loader["full"] % record.world for each in evaluations(record.first))


def _drew(what: str) -> Callable[[Record], bool]:
    def drew(record: Record) -> bool:
        every = [*record.ranks.values(), *record.others.values()]
        return any(each["what"] == what and each["drew"] for events in every for each in of(events, "draw"))

    return drew


def _modal(record: Record) -> bool:
    return any(each["modal"] for reading in evaluations(record.first) for each in of(reading.events, "forward"))


def _accumulates(record: Record) -> bool:
    return any(
        len(of(each.events, "backward")) >= 2 * len(of(each.events, "step")) > 0 for each in trainings(record.first)
    )


def _on_devices(record: Record) -> bool:
    return any("cuda" in device for each in of(record.first, "forward") for device in each["devices"])


# by code: other findings that show it, which take lint's word for what the number is used for
_SHOWN_BY = {"LS109": ("LS208",), "LS204": ("LS206",), "LS205": ("LS104",), "LS303": ("LS304",)}
# by code: the start beside the usual ones in which the fault would have shown
_WAYS = {"LS304": "bare", "LS404": "resumed", "LS407": "resumed"}
# by code: whether a start on several processes was one in which the fault would have shown
_SEEN: dict[str, Callable[[Record], bool]] = {
    "LS101": _trained(2),
    "LS102": _trained(1),
    "LS104": _evaluated,
    "LS105": _uneven,
    "LS106": lambda record: _evaluated(record) and _trained(1)(record),
    "LS107": _trained(1),
    "LS108": lambda record: _events(record, "download"),
    "LS109": _trained(1),
    "LS110": _drew("data"),
    "LS111": lambda record: _events(record, "normalised") or any(map(_normalised, record.others.values())),
    "LS201": _accumulates,
    "LS202": _accumulates,
    "LS203": _summed_up,
    "LS204": _summed_up,
    "LS205": lambda record: _evaluated(record) or _metered(record),
    "LS206": _summed_up,
    "LS207": lambda record: _events(record, "clip") and _events(record, "scaler-step"),
    "LS208": _trained(1),
    "LS209": _trained(1),
    "LS210": lambda record: _events(record, "scheduler") and _trained(1)(record),
    "LS211": _drew("forward"),
    "LS213": lambda record: _events(record, "wrap"),
    "LS214": _modal,
    "LS215": lambda record: _modal(record) and _trained(2)(record),
    "LS301": lambda record: _events(record, "wrap") and _on_devices(record),
    "LS302": lambda record: _events(record, "wrap") and _trained(1)(record),
    "LS309": _trained(1),
    "LS310": lambda record: _on_devices(record) and _trained(1)(record),
    "LS311": _accumulates,
    "LS312": _accumulates,
    "LS313": lambda record: _events(record, "step"),
    "LS401": lambda record: _events(record, "saved"),
    "LS403": lambda record: _events(record, "saved"),
    "LS406": lambda record: bool(_files(record, "saved") & _files(record, "loaded")),
}
