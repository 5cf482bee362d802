"""What is said of a hang: who holds up the rest, by what the ranks posted."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import EXIT_HANG
from lockstep.monitoring.hang import Position, activity, diagnose, report

TORCH = "/site/torch/distributed/distributed_c10d.py"
LOOP = ("/home/me/train.py", 12, "main")
BACKWARD = "the backward pass, with its all-reduces"


def position(rank: int, **fields: Any) -> Position:
    base = Position(rank, 12, "forward-backward", 5.0, 340, "running", "host", "host 1", 100 + rank, 1)
    return dataclasses.replace(base, **{"kind": "collective", "where": "all_reduce", "stacks": f"S{rank}", **fields})


def by_rank(*positions: Position) -> dict[int, Position]:
    return {p.rank: p for p in positions}


@pytest.mark.parametrize(
    ("stack", "phase", "expected"),
    [
        (
            [(TORCH, 4, "all_reduce"), ("/site/torch/distributed/c10d_logger.py", 8, "wrapper"),
             ("/src/lockstep/world.py", 44, "sum"), LOOP],
            "evaluation",
            ("collective", "all_reduce, called from sum (lockstep/world.py:44)"),
        ),
        (
            [(TORCH, 4, "all_gather"), (TORCH, 9, "all_gather_object"), ("/src/lockstep/data/sources.py", 1, "load")],
            "start",
            ("collective", "all_gather_object, called from load (data/sources.py:1)"),
        ),
        (
            [("/site/torch/autograd/graph.py", 1, "_engine_run_backward"), ("/site/torch/_tensor.py", 2, "backward"),
             LOOP],
            "forward-backward",
            ("backward", f"{BACKWARD}, called from main (me/train.py:12)"),
        ),
        ([("/src/lockstep/parallel/exact.py", 5, "write")], "x", ("collective", "write (parallel/exact.py:5)")),
        (
            [("/py/selectors.py", 5, "select"), ("/site/torch/utils/data/dataloader.py", 7, "_try_get_data"), LOOP],
            "loader",
            ("loader", "select (py/selectors.py:5)"),
        ),
        ([LOOP], "loader", ("loader", "main (me/train.py:12)")),
        ([("C:\\me\\lockstep\\checkpoint\\a.py", 3, "f")], "x", ("checkpoint", "f (checkpoint/a.py:3)")),
        ([LOOP], "forward-backward", ("python", "main (me/train.py:12)")),
        ([], "x", ("python", "ended")),
    ],
)  # fmt: skip
def test_a_stack_says_what_a_rank_does(stack: list[Any], phase: str, expected: tuple[str, str]) -> None:
    assert activity(stack, phase) == expected


def test_a_silent_rank_comes_first() -> None:
    answers = by_rank(position(0, seen={"2": "its process is stopped"}), position(1, kind="loader"))
    assert diagnose(3, answers, by_rank(position(2, step=11))) == (
        (2,), "rank 2 (pid 102 on host) is silent at step 11, forward-backward: its process is stopped",
    )  # fmt: skip
    ranks, cause = diagnose(3, answers, {})
    assert ranks == (2,)
    assert "never sent a heartbeat" in cause
    assert diagnose(3, by_rank(position(0)), {})[0] == (1, 2)


@pytest.mark.parametrize("kind", ["loader", "checkpoint", "python"])
def test_who_does_something_else_is_waited_for(kind: str) -> None:
    where = {"kind": kind, "where": "there", "workers": ["worker 1 (pid 9) is sleeping"]}
    ranks, cause = diagnose(3, by_rank(position(0), position(1, collectives=339, **where), position(2)), {})
    assert ranks == (1,)
    assert cause.startswith("rank 1 ")
    worker = "; worker 1 (pid 9) is sleeping" if kind == "loader" else ""
    assert cause.endswith(f"at step 12, for 5.0 s: there{worker}")


def test_on_a_gpu_ranks_wait_anywhere_and_the_count_tells() -> None:
    busy = {"kind": "python", "where": "read"}
    answers = by_rank(position(0, **busy), position(1, **busy), position(2, **busy, collectives=339))
    assert diagnose(3, answers, {})[0] == (2,)
    uncounted = {r: dataclasses.replace(p, collectives=None) for r, p in answers.items()}
    assert diagnose(3, uncounted, {})[0] == (0, 1, 2)


def test_the_one_out_of_order() -> None:
    behind = by_rank(position(0), position(1), position(2, step=13, collectives=339, where="barrier"))
    assert diagnose(3, behind, {}) == (
        (2,),
        "rank 2 skipped a collective: rank 2 at step 13, after 339 collectives, in barrier; "
        "ranks 0, 1 at step 12, after 340 collectives, in all_reduce",
    )
    ahead = by_rank(position(0, collectives=341), position(1), position(2))
    assert diagnose(3, ahead, {})[1].startswith("rank 0 entered one collective more: ")
    elsewhere = by_rank(position(0), position(1, where="barrier"), position(2))
    assert diagnose(3, elsewhere, {})[1].startswith("rank 1 skipped a collective or went another path: ")
    two = by_rank(position(0), position(1, collectives=339))
    ranks, cause = diagnose(2, two, {})
    assert ranks == (1,)
    assert "equally many" in cause


def test_who_left_and_nobody() -> None:
    ranks, cause = diagnose(3, by_rank(position(0), position(1)), by_rank(position(2, state="finished")))
    assert ranks == (2,)
    assert "finished and left" in cause
    assert diagnose(3, by_rank(position(0), position(1), position(2, state="finished")), {})[0] == (2,)
    assert diagnose(3, by_rank(*(position(r) for r in range(3))), {})[0] == ()
    assert diagnose(1, by_rank(position(0, kind="backward")), {})[0] == (0,)


def test_the_report_holds_all() -> None:
    answers = by_rank(
        position(0), position(1, kind="loader", where="there", workers=["worker 7 sleeps"], collectives=339)
    )
    record, text, details = report(3.0, 2, answers, {}, "runs/x/hang-report.txt")
    assert record == {"kind": "fault", "fault": "hang", "ranks": [1], "step": 12, "cause": record["cause"]}
    for words in (
        f"the run hangs at step 12: no progress for 3 s (--hang-timeout); it ends with code {EXIT_HANG}",
        "rank 1 waits for its loader", "rank 0 waits for rank 1", "rank 0  step 12  forward-backward for 5.0 s",
        "339 collectives", "S0", "S1", "runs/x/hang-report.txt",
    ):  # fmt: skip
        assert words in text
    assert "worker 7 sleeps" in details
    silent, _, _ = report(3.0, 2, by_rank(position(0, seen={"1": "its process is running"})), by_rank(position(1)), "")
    assert silent["cause"].endswith("forward-backward: its process is running")
    mine = position(1, seen={"0": "its process is stopped by a signal"})
    alone, text, _ = report(3.0, 3, by_rank(mine), by_rank(position(0), position(2)), "", lost="no answer")
    assert alone["ranks"] == [0, 2]
    assert "the store where the ranks meet is lost: no answer; rank 0 (pid 100 on host) is silent at step" in text
    assert "forward-backward: its process is stopped by a signal; rank 2 (pid 102 on host) is silent" in text


KINDS = st.sampled_from(["collective", "backward", "loader", "checkpoint", "python"])


@given(st.data(), st.integers(1, 5))
def test_any_mix_makes_a_report(data: st.DataObject, size: int) -> None:
    answers, beats = {}, {}
    for rank in range(size):
        p = position(
            rank,
            kind=data.draw(KINDS),
            state=data.draw(st.sampled_from(["running", "long phase", "finished"])),
            collectives=data.draw(st.one_of(st.none(), st.integers(0, 3))),
            where=data.draw(st.sampled_from(["a", "b"])),
        )
        if data.draw(st.booleans()):
            beats[rank] = p
        if rank == 0 or data.draw(st.booleans()):
            answers[rank] = p
    record, text, _ = report(1.0, size, answers, beats, "")
    assert set(record["ranks"]) <= set(range(size))
    silent = {r for r in range(size) if r not in answers and (r not in beats or beats[r].state != "finished")}
    assert not silent or set(record["ranks"]) == silent
    assert all(f"rank {rank}" in text for rank in range(size))
