"""Findings from records made by hand: a right training has none, and each change of its events has its own."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.faults import Finding
from lockstep.commands.audit.findings import findings
from lockstep.commands.audit.records import Record, evaluations, of, trainings
from tests.audit.right_events import event, order, record

Change = Callable[[int, int, list[Event]], list[Event]]


def told(change: Change) -> list[Finding]:
    """What is found on 1, 2 and 4 processes when `change(world, rank, events)` is made on each rank."""
    found = []
    for world in (1, 2, 4):
        right = record(world)
        ranks = {rank: change(world, rank, copy.deepcopy(events)) for rank, events in right.ranks.items()}
        found.append(replace(right, ranks=ranks))
    return findings(found)


def test_a_right_training_is_clean_and_read_as_it_was_made() -> None:
    right = [record(world) for world in (1, 2, 4)]
    assert findings(right) == []
    assert findings(right[1:]) == []
    first = right[2].first
    assert [each.trains for each in trainings(first)] == [True, True]
    assert [len(of(each.events, "step")) for each in trainings(first)] == [6, 6]
    assert [each.ids for each in evaluations(first)] == [[0, 4, 8]] * 2
    assert [each.whole for each in trainings(first)] == [True, True]


def one_order(_world: int, _rank: int, events: list[Event]) -> list[Event]:
    batches = [each for each in events if each["event"] == "batch" and each["loader"] == 0]
    for first, second in zip(batches, batches[len(batches) // 2 :], strict=False):
        second["ids"] = first["ids"]
    return events


def padded(world: int, rank: int, events: list[Event]) -> list[Event]:
    for each in events:
        if each["event"] == "batch" and each["loader"] == 1 and 0 < 10 % world <= rank:
            each["ids"] = [*each["ids"], rank - 2]
    return events


def larger(world: int, _rank: int, events: list[Event]) -> list[Event]:
    """N times the batch: of the steps of an epoch each N-th is left, with its forward and backward pass."""
    found, taken = list[Event](), 0
    for each in events:
        if each["event"] == "batch" and each["loader"] == 0:
            each["size"] *= world
            taken = each["number"]
        training = each["event"] in ("forward", "zero", "backward", "step") and each.get("training", True)
        found += [] if training and taken % world else [each]
    return found


def faster(world: int, _rank: int, events: list[Event]) -> list[Event]:
    for each in of(events, "step"):
        each["lr"] = [0.1 * world]
    return events


def larger_and_faster(world: int, rank: int, events: list[Event]) -> list[Event]:
    return faster(world, rank, larger(world, rank, events))


def in_evaluation_mode(_world: int, _rank: int, events: list[Event]) -> list[Event]:
    for each in of(events, "forward")[7:]:
        each["training"] = False
    return events


def before_each(kind: str, new: Event) -> Change:
    def change(_world: int, _rank: int, events: list[Event]) -> list[Event]:
        return [one for each in events for one in ([dict(new), each] if each["event"] == kind else [each])]

    return change


def without(kind: str) -> Change:
    return lambda _world, _rank, events: [each for each in events if each["event"] != kind]


def with_values(kind: str, **values: object) -> Change:
    def change(_world: int, _rank: int, events: list[Event]) -> list[Event]:
        return [each | values if each["event"] == kind else each for each in events]

    return change


def saved_by_all(_world: int, rank: int, events: list[Event]) -> list[Event]:
    saved = event("saved", "train.py:36", path="last.pt", kind="weights", keys=[], module=False)
    return events if rank == 0 else [*events[:-2], saved, *events[-2:]]


def another_rounding(scale: float) -> Change:
    def change(world: int, _rank: int, events: list[Event]) -> list[Event]:
        for each in of(events, "step")[2:]:
            each["weights"]["bn1.weight"][1] *= 1 + scale * (world - 1)
        return events

    return change


def unequal(world: int, rank: int, events: list[Event]) -> list[Event]:
    """Rank 0 has the first sample of rank 1 as well, in the first step; the weights are others from there on."""
    if world > 1:
        first = next(each for each in events if each["event"] == "batch" and each["loader"] == 0)
        moved = order(0)[1]
        first["ids"] = [*first["ids"], moved] if rank == 0 else [each for each in first["ids"] if each != moved]
        for each in of(events, "step"):
            each["weights"]["conv.weight"][1] *= 1.01
    return events


def accumulating(_world: int, _rank: int, events: list[Event]) -> list[Event]:
    """Every second step is left out: two passes for each."""
    steps = of(events, "step")
    skipped = [id(each) for each in steps[::2]]
    return [each for each in events if id(each) not in skipped]


DRAW = event("draw", "train.py:22", what="forward", states={"torch": "same", "cuda": "same"}, drew=["cuda"])
CASES: dict[str, tuple[Change, set[str], str]] = {
    "one order": (one_order, {"LS101"}, "epoch 2 had epoch 1's order: all 12 samples of rank 0"),
    "another set": (with_values("loader", aligned=False, sampled=12), {"LS102"}, "has 12 samples"),
    "a part": (without("collective"), {"LS104"}, "rank 0 evaluated 3 of 10 images"),
    "padding": (padded, {"LS105"}, "4 ranks evaluated 12 images of a set of 10: padding counts 2 of them twice"),
    "the training set": (with_values("loader", dataset="one"), {"LS106"}, "are among the 48 that were trained on"),
    "larger": (larger, {"LS208"}, "on 4 processes 4.0 x fewer steps at the same rate: 32 samples a step instead of 8"),
    "faster": (faster, {"LS209"}, "on 4 processes 4.0 x the rate for the same 8 samples a step: 0.4 instead of 0.1"),
    "larger and faster": (larger_and_faster, set(), ""),
    "equal masks": (before_each("backward", DRAW), {"LS211"}, "all 4 ranks drew the same numbers"),
    "training mode": (with_values("forward", training=True), {"LS214"}, "3 images were evaluated in training mode"),
    "evaluation mode": (in_evaluation_mode, {"LS215"}, "epoch 2 trained in evaluation mode, 6 of 6 passes"),
    "past DDP": (with_values("forward", wrapped=""), {"LS302"}, "12 training passes went past DDP"),
    "saved by all": (saved_by_all, {"LS401"}, "last.pt is written by 4 of 4 ranks"),
    "beyond rounding": (another_rounding(1e-2), {"LS501"}, "beyond rounding from step 3, first in bn1.weight"),
    "rounding": (another_rounding(1e-7), set(), ""),
    "unequal batches": (unequal, {"LS203"}, "step 1, first in conv.weight, in which the ranks have 3 and 2 and"),
    "accumulating": (accumulating, {"LS201"}, "2 passes a step go backward from the whole loss"),
    "every rank downloads": (
        before_each("group", event("download", "train.py:7", kind="MNIST", root="data")),
        {"LS108"},
        "ranks 0 and 1 download MNIST",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_told_by_its_code_and_in_numbers(name: str) -> None:
    change, codes, words = CASES[name]
    found = told(change)
    assert {each.code for each in found} == codes, found
    assert words in " ".join(each.says for each in found), found


def test_a_loader_that_is_a_batch_ahead_is_read_as_one_that_is_not() -> None:
    def ahead(_world: int, _rank: int, events: list[Event]) -> list[Event]:
        kept, found = list[Event](), list[Event]()
        for each in events:  # each batch's passes and step come after the next batch, the last one's after the end
            fetching = each["event"] in ("batch", "pass-end")
            if fetching or each["event"] in ("pass", "collective"):
                found += [each, *kept] if fetching else [*kept, each]
                kept = []
            else:
                kept.append(each)
        return [*found, *kept]

    assert told(ahead) == []
    events = ahead(2, 0, record(2).first)
    assert [each.trains for each in trainings(events)] == [True, True]
    assert [len(of(each.events, "step")) for each in trainings(events)] == [6, 6]


def test_what_batch_norm_does_to_shares_is_a_note() -> None:
    def change(world: int, rank: int, events: list[Event]) -> list[Event]:
        return with_values("wrap", batch_norms=1)(world, rank, another_rounding(1e-2)(world, rank, events))

    (note,) = told(change)
    assert note.note
    assert "batch norm takes the statistics of each of 4 ranks' batches" in note.says


def test_a_record_of_nothing_has_no_findings() -> None:
    empty = Record(2, {0: [event("process", parent=1, rank=0, world=2)], 1: []})
    assert findings([empty, Record(4, {})]) == []
