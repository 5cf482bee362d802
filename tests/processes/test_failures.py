"""Which of several failures the user is told of. test_bad_input has the same with real processes."""

import json
import multiprocessing
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lockstep.config.objects import load_object
from lockstep.errors import PeerError, UserError
from lockstep.processes.failures import (
    WorkerFailed,
    exit_with_failure,
    first_failure,
    is_peer_loss,
    last_line,
    other_failure,
    reported_already,
)

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer")


def elastic(rank: int, code: int) -> Any:
    """What torch's elastic launcher raises, as far as it is read."""
    failure = SimpleNamespace(exitcode=code)
    return SimpleNamespace(get_first_failure=lambda: (rank, failure), failures={rank: failure})


def failing(error: BaseException, rank: int, folder: Path) -> int:
    """Let a process of its own fail; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=exit_with_failure, args=(error, rank, folder))
    process.start()
    process.join()
    return process.exitcode or 0


def test_each_kind_of_error_leaves_its_code_and_words(tmp_path: Path) -> None:
    cases: list[tuple[BaseException, int, str, bool]] = [
        (UserError("no such file", "Put it there."), 2, "no such file\n  Put it there.", True),
        (ValueError("bad luck"), 1, "ValueError: bad luck", True),
        (SystemExit("I give up"), 1, "SystemExit: I give up", True),
        (SystemExit(3), 3, "SystemExit: 3", True),
        (SystemExit(128 + signal.SIGTERM), 143, "SystemExit: 143", False),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt", False),
    ]
    for rank, (error, code, message, cause) in enumerate(cases):
        assert failing(error, rank, tmp_path) == code
        word = json.loads((tmp_path / f"failure-{rank}.json").read_text())
        assert (word["rank"], word["message"], word["cause"], word["code"]) == (rank, message, cause, code)
        assert bool(word["trace"]) == isinstance(error, ValueError)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"failure-{rank}.json" for rank in range(len(cases))]


def test_the_cause_is_told_whoever_ended_first(tmp_path: Path) -> None:
    failing(KeyboardInterrupt(), 2, tmp_path)
    assert other_failure(tmp_path) is None
    failing(ValueError("bad luck"), 1, tmp_path)
    failing(LOST, 0, tmp_path)  # at once: the cause has left word already
    told = first_failure(tmp_path, elastic(0, 1))
    assert (told.rank, told.message, told.exit_code) == (1, "ValueError: bad luck", 1)
    assert told.trace.endswith("ValueError: bad luck\n")
    assert str(told) == "rank 1: ValueError: bad luck"
    assert told.trace in "".join(told.__notes__)  # a script that does not catch it shows both tracebacks
    assert str(other_failure(tmp_path)) == "rank 1: ValueError: bad luck"


def test_a_killed_worker_is_named_with_its_signal(tmp_path: Path) -> None:
    failing(UserError("another", ""), 0, tmp_path)
    told = first_failure(tmp_path, elastic(3, -signal.SIGSEGV))
    assert (told.rank, told.message, told.exit_code) == (3, "killed by SIGSEGV", 1)
    assert "out of memory" in str(first_failure(tmp_path, elastic(3, -signal.SIGKILL)))


def test_a_worker_that_left_no_word(tmp_path: Path) -> None:
    told = first_failure(tmp_path, elastic(1, 7))
    assert (str(told), told.exit_code) == ("rank 1: ended with exit code 7", 7)


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        PeerError("rank 0 failed"),
        RuntimeError("Connection closed by peer [10.0.0.1]:4"),
        RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
        dist.DistNetworkError("failed to recv"),
    ],
)
def test_what_a_lost_peer_looks_like(error: BaseException) -> None:
    assert is_peer_loss(error)


def test_the_loss_that_gloo_and_the_store_really_report_is_known() -> None:
    with pytest.raises(dist.DistError) as caught:
        TCPStore("localhost", 1, is_master=False, timeout=load_object("datetime:timedelta", "x")(milliseconds=50))
    assert is_peer_loss(caught.value)


@pytest.mark.parametrize(
    "error",
    [ValueError("closed by peer"), UserError("Broken pipe"), RuntimeError("shapes do not fit"), KeyError("gloo")],
)
def test_what_is_an_error_of_its_own(error: BaseException) -> None:
    assert not is_peer_loss(error)


def test_last_line() -> None:
    assert last_line(ValueError("a\nb")) == "ValueError: a\nb"
    assert isinstance(WorkerFailed(0, "x", 1), Exception)


def test_the_same_error_is_told_by_the_first_rank_that_comes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert reported_already("x")  # before the ranks have met, local rank 0 speaks
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not reported_already("x")
