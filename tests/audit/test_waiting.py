"""A script that hangs ends with who waits where, and which call is never made."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.commands.audit import launch
from lockstep.commands.audit.findings.ranks import apart, where_ranks_wait
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.records import Record
from lockstep.commands.audit.starter import _work
from lockstep.commands.audit.waiting import stacks

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn

def epoch(rank):
    for step in range(20):
        if not (rank == 3 and step == 16):
            dist.all_reduce(torch.ones(3))
    if rank == 3:
        while True:
            dist.barrier()

def uneven(rank):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    for step in range(3 + rank):
        model(torch.ones(2, 4)).sum().backward()
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).wait(["never"])

if __name__ == "__main__":
    dist.init_process_group("gloo")
    MODE(dist.get_rank())
"""


def call(op: str, number: int, at: str = "t.py:9", shape: list[int] | None = None) -> dict[str, Any]:
    return {"event": "collective", "op": op, "number": number, "group": 2, "at": at, "shape": shape}


def waits(at: str, *inside: str) -> dict[str, Any]:
    return {"event": "waiting", "at": at, "stack": [at] if at else [], "inside": list(inside)}


GROUP = {"event": "group", "rank": 0, "world": 2, "at": "t.py:1"}
DONE = {"event": "end", "how": "done", "at": ""}
LOST = {"event": "end", "how": "error", "at": "t.py:9", "error": "RuntimeError: Connection closed by peer"}


def told(ended: str, one: list[dict[str, Any]], two: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    record = Record(2, {0: [GROUP, *one], 1: [GROUP, *two]}, ended=ended)
    return [each.says for each in apart([record])], where_ranks_wait(record)


def test_a_call_that_meets_another_one_is_told_though_nobody_waits() -> None:
    lost = {"event": "end", "how": "error", "at": "t.py:20", "error": "RuntimeError: Connection reset by peer"}
    printed = ("gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 212 vs 4. Received data", "Traceback")
    record = Record(2, {0: [GROUP, call("all_reduce", 0)], 1: [GROUP, lost]}, ended="failed", printed=printed)
    (found,) = apart([record])
    assert found.says.startswith("rank 1 never calls the 1st all_reduce (t.py:9), in which rank 0 waits; it got")
    assert "212 bytes instead of 4" in found.says
    assert not list(apart([Record(2, record.ranks, ended="failed", printed=("Traceback", "Traceback"))]))


def test_the_call_that_a_rank_never_makes_is_named() -> None:
    reduces = [call("all_reduce", number) for number in range(17)]
    found, places = told(
        "stalled", [*reduces, waits("t.py:9", "all_reduce")], [*reduces[:16], waits("t.py:20", "sleepy", "other")]
    )
    assert found == [
        "rank 1 never calls the 17th all_reduce (t.py:9), in which rank 0 waits; rank 1 is at t.py:20 in sleepy"
    ]
    assert places == ["rank 0 waits in all_reduce at t.py:9, its 17th", "rank 1 is at t.py:20 in sleepy"]


def test_different_calls_and_shapes_at_one_place() -> None:
    reduce, barrier = call("all_reduce", 0), call("barrier", 1, "t.py:30")
    found, _ = told(
        "stalled", [reduce, reduce, waits("t.py:9", "all_reduce")], [reduce, barrier, waits("t.py:30", "barrier")]
    )
    assert found == [
        "rank 1 never calls the 2nd all_reduce (t.py:9), in which rank 0 waits; "
        "rank 1 waits in barrier at t.py:30, its 1st"
    ]
    found, _ = told("deadline", [call("all_reduce", 0, shape=[3])], [call("all_reduce", 0, shape=[4])])
    assert found == ["the 1st collective, an all_reduce, is of [3] on rank 0, [4] on rank 1"]


def test_a_rank_that_left_is_told_and_one_that_failed_by_itself_is_not() -> None:
    reduce = call("all_reduce", 0)
    assert told("failed", [reduce, LOST], [DONE])[0] == [
        "rank 1 never calls the 1st all_reduce (t.py:9), in which rank 0 waits; rank 1 has ended by itself"
    ]
    assert told("failed", [reduce, LOST], [{**LOST, "error": "ValueError: mine"}]) == ([], [])
    assert told("done", [reduce], [reduce]) == ([], [])
    assert told("done", [reduce], []) == ([], [])


def test_stacks_are_the_users_lines_and_what_they_called(tmp_path: Path) -> None:
    text = '  File "/lib/torch.py", line 7 in inner\n  File "/lib/d.py", line 8 in all_reduce\n'
    text += f'  File "{tmp_path}/a.py", line 9 in f\n'
    text += '  File "/lib/x", line 1 in go\n'
    (tmp_path / "12.stack").write_text(f"Stack (most recent call first):\n{text}" * 2)
    (tmp_path / "13.stack").write_text("")
    assert stacks(tmp_path, str(tmp_path)) == {12: {"stack": ["a.py:9"], "inside": ["inner", "all_reduce"]}}


def test_who_is_asked_at_its_end_ends_as_it_would(tmp_path: Path) -> None:
    ending = (  # as the interpreter does it, when others still see a process
        "import faulthandler, os, sys\n"
        "from lockstep.commands.audit import plan, waiting\n"
        "waiting.install(plan.Plan('', (), '', '', sys.argv[1], 1))\n"
        "os.kill(os.getpid(), waiting.SIGNAL)\n"
        "faulthandler.unregister(waiting.SIGNAL)\n"
        "os.kill(os.getpid(), waiting.SIGNAL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", ending, str(tmp_path)], timeout=60)
    assert ended.returncode == 0
    (stack,) = tmp_path.glob("*.stack")
    assert "Stack (most recent call first)" in stack.read_text()


def test_the_work_of_a_process_that_has_ended_is_not_taken_back() -> None:
    """Else what the others do then looks like waiting, until they have done as much."""
    before = _work()
    burning = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burning], timeout=60, check=True)
    assert _work() - before > 0.2


def _ran(folder: Path, mode: str, nproc: int) -> Record:
    script = folder / "mine" / "hang.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.replace("MODE", mode))
    with launch.starter(script) as process:
        plan = Plan("", (), "", "", "", nproc, stall_s=5, deadline_s=120)
        return launch.start(process, script, [], plan, folder / "run")


@pytest.mark.slow
def test_real_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    record = _ran(tmp_path / "one", "epoch", 4)
    assert record.ended == "stalled", record.printed
    (found,) = apart([record])
    assert found.code == "LS308"
    assert found.says.startswith(
        "rank 3 never calls the 20th all_reduce (hang.py:8), in which ranks 0, 1 and 2 wait"
    ), found
    assert where_ranks_wait(record) == [
        "rank 0 waits in all_reduce at hang.py:8, its 20th",
        "rank 1 waits in all_reduce at hang.py:8, its 20th",
        "rank 2 waits in all_reduce at hang.py:8, its 20th",
        "rank 3 waits in barrier at hang.py:11, its 1st",
    ]
    record = _ran(tmp_path / "two", "uneven", 2)
    assert record.ended == "stalled", record.printed
    (found,) = apart([record])
    assert found.at == "hang.py:16"
    assert found.says == (
        "rank 1 waits in the 4th backward pass, which has DDP's collectives; rank 0 made 3 backward passes"
    )
