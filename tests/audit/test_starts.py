"""Starts beside the usual ones, what ranks do at one time, and orders that stay: what is said of them."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from lockstep.commands.audit.events import Event
from lockstep.commands.audit.findings import findings
from lockstep.commands.audit.launch import _option, local_rank_option
from lockstep.commands.audit.records import Record, of, trainings
from tests.audit.right_events import event, record

LOADED = event("loaded", "train.py:12", path="last.pt", map_location="cpu", weights_only=True)


def whole() -> Record:
    """An uninterrupted run on one process, whose steps say what they begin with."""
    run = record(1)
    for number, reading in enumerate(trainings(run.first)):
        next(iter(of(reading.events, "pass"))).update(epoch=number)
        of(reading.events, "step")[0].update(begun=f"weights {number}", state=2 * number, lr=[0.1 / (1 + number)])
    return run


def resumed(run: Record, **begin: Any) -> Record:
    """The same run's second half, after it has loaded the first one's file; `begin`: what is different of its begin."""
    events = copy.deepcopy(run.first)
    half = events.index(trainings(events)[1].events[0])
    head = [each for each in events[:half] if each["event"] in ("process", "group", "wrap", "loader")]
    rest = events[half:]
    of(rest, "pass")[0].update({key: value for key, value in begin.items() if key == "epoch"})
    of(rest, "step")[0].update({key: value for key, value in begin.items() if key != "epoch"})
    return Record(1, {0: [*head, LOADED, *rest]}, purpose="resumed")


@pytest.mark.parametrize(
    ("begin", "code", "words"),
    [
        ({}, "", ""),
        ({"state": 0}, "LS404", "the optimizer has nothing instead of 2 tensors"),
        ({"lr": [0.1]}, "LS404", "the rate is 0.1 instead of 0.05"),
        ({"epoch": 0}, "LS407", "it has epoch 0 again, where the uninterrupted run has epoch 1"),
        ({"epoch": 0, "lr": [0.1]}, "LS407", "it has epoch 0 again"),
        ({"state": 0, "begun": "others"}, "", ""),  # other weights: something else was loaded
    ],
)
def test_what_a_resumed_run_begins_with(begin: dict[str, Any], code: str, words: str) -> None:
    found = findings([whole()], [resumed(whole(), **begin)])
    assert [each.code for each in found] == [code] * bool(code)
    assert all(each.at == "train.py:12" and words in each.says for each in found), found


def test_a_file_is_handed_over_after_a_meeting() -> None:
    def told(meet: bool) -> list[str]:
        run = record(2)
        for rank, events in run.ranks.items():
            barrier = event("collective", "train.py:37", op="barrier", number=9, shape=None, group=2)
            here = next(place for place, each in enumerate(events) if each["event"] == "group-end")
            saved = event("saved", "train.py:36", path="done.pt", kind="weights", keys=[], module=False)
            events[here:here] = [saved] * (rank == 0) + [barrier] * meet + [LOADED | {"path": "done.pt"}]
        return [f"{each.code} {each.at} {each.says}" for each in findings([run])]

    assert told(True) == []
    assert told(False) == [
        "LS406 train.py:12 rank 0 saves done.pt (train.py:36) and rank 1 loads it with no collective in between"
    ]


def test_downloads_at_one_time_are_told_and_those_in_turn_are_not() -> None:
    def told(turns: bool) -> list[str]:
        run = record(2)
        for rank, events in run.ranks.items():
            asked = event("download", "train.py:7", kind="MNIST", root="data")
            barrier = event("collective", "train.py:6", op="barrier", number=0, shape=None, group=2)
            here = next(place for place, each in enumerate(events) if each["event"] == "wrap")
            both = [asked, barrier] if rank == 0 else [barrier, asked]
            events[here:here] = both if turns else [asked]
        return [f"{each.code} {each.says}" for each in findings([run])]

    assert told(True) == []
    assert told(False) == ["LS108 ranks 0 and 1 download MNIST to data at one time"]


def test_without_the_local_rank_ranks_share_a_gpu_or_fail() -> None:
    def bare(ended: str, *events: Event) -> Record:
        group = event("group", rank=0, world=2)
        return Record(2, {rank: [group, *events] for rank in (0, 1)}, ended=ended, purpose="bare")

    device = event("device", "train.py:9", index=0, how="set_device", devices=2)
    (shared,) = findings([], [bare("done", device)])
    assert (shared.code, shared.at) == ("LS304", "train.py:9")
    assert shared.says.startswith("started as by torchrun, without it: ranks 0 and 1 all use cuda:0")
    error = event("end", "train.py:8", how="exit", code=2)
    (failed,) = findings([], [bare("failed", error)])
    assert failed.says == "started as by torchrun, without it, rank 0 fails with exit code 2"
    assert findings([], [bare("done", event("end", how="done"))]) == []
    assert findings([replace(bare("done", device), purpose="", ranks={0: [device]})]) == []


def test_options_are_read_from_the_script() -> None:
    path = 'parser.add_argument("--resume", default="", help="checkpoint")'
    flag = 'parser.add_argument("-r", "--resume", action="store_true")'
    assert _option(path, [], "last.pt") == ["--resume", "last.pt"]
    assert _option(flag, ["--epochs", "3"], "last.pt") == ["--resume"]
    assert _option(path, ["--resume=mine.pt"], "last.pt") == []
    assert _option('parser.add_argument("--load-workers", type=int)', [], "last.pt") == []
    assert local_rank_option('parser.add_argument("--local-rank", type=int)') == "--local-rank"
    assert local_rank_option('add_argument("--local_rank", default=int(os.environ["LOCAL_RANK"]))') == ""


def test_an_own_sampler_that_keeps_its_epoch_is_told() -> None:
    def told(epoch: int | None, ascending: bool, world: int = 2) -> set[str]:
        run = record(world)
        for events in run.ranks.values():
            for each in of(events, "loader"):
                each["replicas"] = None
            batches = [each for each in of(events, "batch") if each["loader"] == 0]
            for first, second in zip(batches, batches[len(batches) // 2 :], strict=False):
                second["ids"] = first["ids"]
            for each in of(events, "pass"):
                each["epoch"] = epoch
            for each in of(events, "pass-end"):
                each["ascending"] = ascending
        return {each.code for each in findings([run])}

    assert told(0, False) == {"LS101"}
    assert told(None, False) == set()
    assert told(0, True) == set()
    assert told(0, False, world=1) == set()
