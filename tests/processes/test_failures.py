"""Which of several failures the user is told of. test_bad_input has the same with real processes."""

import signal

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lockstep.config.objects import is_of_a_signal, load_object
from lockstep.errors import EXIT_HANG, PeerError, UserError
from lockstep.processes.failures import (
    Failure,
    WorkerFailed,
    failure_of,
    first_failure,
    is_peer_loss,
    last_line,
    reported_already,
)

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer")


def failed(error: BaseException, rank: int = 0) -> Failure:
    """What a worker says of an error that was raised."""
    try:
        raise error
    except BaseException as raised:
        failure = failure_of(raised, rank)
    assert failure is not None
    return failure


def test_each_kind_of_error_has_its_code_and_words() -> None:
    cases: list[tuple[BaseException, int, str, bool]] = [
        (UserError("no such file", "Put it there."), 2, "no such file\n  Put it there.", True),
        (ValueError("bad luck"), 1, "ValueError: bad luck", True),
        (SystemExit("I give up"), 1, "SystemExit: I give up", True),
        (SystemExit(3), 3, "SystemExit: 3", True),
        (SystemExit(128 + signal.SIGTERM), 143, "ended by SIGTERM", False),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt", False),
    ]
    for rank, (error, code, message, cause) in enumerate(cases):
        said = failed(error, rank)
        assert (said.rank, said.message, said.cause, said.code) == (rank, message, cause, code)
        assert bool(said.trace) == isinstance(error, ValueError)
    assert failure_of(SystemExit(0), 0) is None


def test_an_exit_is_of_a_signal_by_its_code() -> None:
    stops = (KeyboardInterrupt(), *(SystemExit(128 + n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)))
    assert all(map(is_of_a_signal, stops))
    others = (None, ValueError("bad luck"), *(SystemExit(code) for code in (None, 0, 1, 128, 255, -1, "I give up")))
    assert not any(map(is_of_a_signal, others))


def test_the_cause_is_told_whoever_ended_first() -> None:
    told = first_failure(
        {0: 1, 1: 1}, [failed(KeyboardInterrupt(), 2), failed(LOST, 0), failed(ValueError("bad luck"), 1)]
    )
    assert (told.rank, told.message, told.exit_code) == (1, "ValueError: bad luck", 1)
    assert told.trace.endswith("ValueError: bad luck\n")
    assert str(told) == "rank 1: ValueError: bad luck"
    assert told.trace in "".join(told.__notes__)  # a script that does not catch it shows both tracebacks
    assert not told.transient
    assert first_failure({0: 1}, [failed(LOST, 0)]).transient


def test_a_killed_worker_is_named_with_its_signal() -> None:
    told = first_failure({0: 1, 3: -signal.SIGSEGV}, [failed(LOST, 0)])
    assert (told.rank, told.message, told.exit_code, told.transient) == (3, "killed by SIGSEGV", 1, True)
    assert "out of memory" in str(first_failure({3: -signal.SIGKILL}, []))


def test_a_worker_that_left_no_word() -> None:
    silent = first_failure({0: 0, 1: 7}, [])
    assert (str(silent), silent.exit_code) == ("rank 1: ended with exit code 7", 7)
    hung = first_failure({0: 1, 1: EXIT_HANG}, [failed(LOST, 0)])
    assert (hung.rank, hung.exit_code, hung.transient) == (1, EXIT_HANG, True)


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
