"""Numbers that a script tells, against the losses that were seen: records made by hand."""

import copy
from collections.abc import Callable

import pytest

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.faults import Finding
from lockstep.commands.audit.findings import findings
from lockstep.commands.audit.records import Record
from tests.audit.right_events import event, record

WORLD = 2
Losses = list[list[tuple[float, int]]]  # by rank: value and samples of each batch of a training pass


def with_losses(values: Losses, tells: Callable[[int], list[Event]], **loader: object) -> list[Finding]:
    """What is found where each training pass has these losses, and ranks tell something after it."""
    made = record(WORLD)
    ranks = {}
    for rank, events in made.ranks.items():
        found, left = list[Event](), list[tuple[float, int]]()
        for each in copy.deepcopy(events):
            if each["event"] == "loader" and each["loader"] == 0:
                each |= loader
            if each["event"] == "batch" and each["loader"] == 0:
                left = left or list(values[rank])
                value, each["size"] = left.pop(0)
                each["ids"] = each["ids"][: each["size"]]
                found += [each, event("loss", "train.py:24", value=value, size=each["size"], learns=True)]
            else:
                found.append(each)
            if each["event"] == "pass-end" and each["loader"] == 0:
                found += tells(rank)
        ranks[rank] = found
    return findings([Record(WORLD, ranks)])


def told(text: str, at: str = "train.py:29") -> Event:
    return event("printed", at, text=text)


EVEN: Losses = [[(2.0 + 0.1 * number, 4) for number in range(6)], [(1.0 + 0.1 * number, 4) for number in range(6)]]
OWN, ALL = 2.25, 1.75


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("loss 2.2500", "LS204"),
        ("loss 1.7500", ""),
        ("loss 2.25", ""),  # three digits may be any number's
        ("rank 0 loss 2.2500", ""),  # it says whose it is
        ("loss 2.3000", ""),
    ],
)
def test_a_number_is_a_ranks_own_or_of_all(text: str, code: str) -> None:
    found = with_losses(EVEN, lambda rank: [told(text)] if rank == 0 else [])
    assert {each.code for each in found} == ({code} if code else set()), found
    if code:
        assert found[0].says == "2.2500 is the mean over rank 0's 24 samples; over all 48 it is 1.7500"


def test_each_rank_may_tell_its_own() -> None:
    assert with_losses(EVEN, lambda rank: [told(f"loss {OWN - rank:.4f}")]) == []


def test_a_result_that_was_reduced_and_is_not_told_was_dropped() -> None:
    def tells(rank: int) -> list[Event]:
        values = {"number": 7, "shape": [], "group": WORLD, "values": [OWN - rank]}
        reduced = event("collective", "train.py:28", op="all_reduce", **values)
        return [reduced, *([told("loss 2.2500")] if rank == 0 else [])]

    (found,) = with_losses(EVEN, tells)
    assert (found.code, found.at) == ("LS206", "train.py:29")
    assert found.says.endswith("and the all_reduce at train.py:28 has had it")


def test_a_mean_of_unequal_batches_means_is_told() -> None:
    short: Losses = [[(1.0, 4), (1.0, 4), (1.0, 4), (1.0, 4), (1.0, 4), (3.0, 1)] for _ in range(WORLD)]
    right, means = (20 + 3) / 21, 8 / 6

    def codes(value: float, full: int) -> list[str]:
        tells = lambda rank: [told(f"loss {value:.4f}")] if rank == 0 else []  # noqa: E731
        return sorted({each.code for each in with_losses(short, tells, unshortened=full)} - {"LS501"})

    assert codes(means, 42) == ["LS203"]
    assert codes(right, 42) == []
    assert codes(means, 48) == []  # only the audit's small set has an unequal batch


def test_a_rate_that_each_rank_lowers_by_a_number_of_its_own() -> None:
    def codes(apart: float) -> set[str]:
        found = copy.deepcopy(record(WORLD))
        for rank, events in found.ranks.items():
            events.append(event("scheduler", "t.py:4", scheduler=0, lr=[0.1], metric=1.0 + apart * rank))
        return {each.code for each in findings([found])}

    assert codes(0.1) == {"LS205"}
    assert codes(0.0) == set()
