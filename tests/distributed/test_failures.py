"""Which of several failures the user is told of. test_bad_input has the same with real processes."""

import errno
import pickle
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lockstep.config.objects import is_of_a_signal
from lockstep.distributed.failures import (
    WorkerFailed,
    at_a_limit,
    failure_of,
    first_failure,
    is_peer_loss,
    last_line,
    reported_already,
)
from lockstep.errors import EXIT_HANG, PeerError, StoppedBySignal, UserError

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer")


def failed(error: BaseException, rank: int = 0) -> WorkerFailed:
    """What a worker says of an error that was raised."""
    try:
        raise error
    except BaseException as raised:
        failure = failure_of(raised, rank)
    assert failure is not None
    sent: WorkerFailed = pickle.loads(pickle.dumps(failure))
    assert (vars(sent), str(sent)) == (vars(failure), str(failure))
    return sent


def test_each_kind_of_error_has_its_code_and_words() -> None:
    cases: list[tuple[BaseException, int, str, bool]] = [
        (UserError("no such file", "Put it there."), 2, "no such file\n  Put it there.", True),
        (ValueError("bad luck"), 1, "ValueError: bad luck", True),
        (SystemExit("I give up"), 1, "SystemExit: I give up", True),
        (SystemExit(3), 3, "SystemExit: 3", True),
        (SystemExit(143), 143, "SystemExit: 143", True),  # the user's own code says so, not a signal
        (StoppedBySignal(128 + signal.SIGTERM), 143, "ended by SIGTERM", False),
        (KeyboardInterrupt(), 130, "ended by SIGINT", False),
    ]
    for rank, (error, code, message, cause) in enumerate(cases):
        said = failed(error, rank)
        says, _, place = said.message.partition("\n  called at ")
        assert (said.rank, says, not said.transient, said.exit_code) == (rank, message, cause, code)
        assert place.endswith("raise error") == isinstance(error, UserError)
        assert bool(said.trace) == isinstance(error, ValueError)
    assert failure_of(SystemExit(0), 0) is None


def test_an_exit_is_of_a_signal_where_a_handler_raised_it() -> None:
    assert all(map(is_of_a_signal, (KeyboardInterrupt(), StoppedBySignal(128 + signal.SIGTERM))))
    others = (None, ValueError("bad luck"), *(SystemExit(code) for code in (None, 0, 1, 143, 129, -1, "I give up")))
    assert not any(map(is_of_a_signal, others))


def test_a_limit_of_the_system_is_a_sentence_with_its_place_and_remedy() -> None:
    limits: list[tuple[BaseException, str]] = [
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "pids limit"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v"),
        (MemoryError(), "--batch-size"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "ulimit -v"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "--accumulate"),
    ]
    for error, remedy in limits:
        said = failed(error)
        assert (said.exit_code, said.transient, said.trace) == (2, False, "")
        assert "test_failures.py" in said.message
        assert remedy in said.message.partition("\n")[2], said
    assert at_a_limit(ValueError("can't start new thread")) is None
    assert at_a_limit(RuntimeError("shapes do not fit")) is None
    assert "out of range" in str(at_a_limit(RuntimeError("CUDA error: device-side assert triggered")))


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
    assert first_failure({0: 1, 2: 1}, [failed(LOST, 0), failed(KeyboardInterrupt(), 2)]).rank == 2


def test_a_killed_worker_is_named_with_its_signal() -> None:
    told = first_failure({0: 1, 3: -signal.SIGSEGV}, [failed(LOST, 0)])
    assert (told.rank, told.message, told.exit_code, told.transient) == (3, "killed by SIGSEGV", 1, True)
    assert "out of memory" in str(first_failure({3: -signal.SIGKILL}, []))


def test_a_rank_that_ended_without_a_word_is_named_before_those_that_lost_it() -> None:
    for code in (7, 0):
        silent = first_failure({1: code, 0: 1}, [failed(LOST, 0)])
        assert (silent.rank, silent.exit_code) == (1, code or 1)
        assert silent.message.startswith(f"its process ended with exit code {code} and no error")
    assert first_failure({1: 0, 0: 1}, [failed(LOST, 0)], returned=[1]).rank == 0
    hung = first_failure({0: 1, 1: EXIT_HANG}, [failed(LOST, 0)])
    assert (hung.rank, hung.exit_code, hung.transient) == (1, EXIT_HANG, True)


def test_a_lost_peer_is_told_from_an_error_of_its_own() -> None:
    with pytest.raises(dist.DistError) as really:  # as the store reports it
        TCPStore("localhost", 1, is_master=False, timeout=timedelta(milliseconds=50))
    for lost in (
        LOST,
        PeerError("rank 0 failed"),
        RuntimeError("Connection closed by peer [10.0.0.1]:4"),
        RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
        dist.DistNetworkError("failed to recv"),
        really.value,
    ):
        assert is_peer_loss(lost), lost
    own = (ValueError("closed by peer"), UserError("Broken pipe"), RuntimeError("shapes do not fit"), KeyError("gloo"))
    assert [error for error in own if is_peer_loss(error)] == []


def test_last_line() -> None:
    error = ValueError("a\nb")
    error.add_note("lockstep: rank 0: ")
    assert last_line(error) == "ValueError: a\nb"


def test_the_same_error_is_told_by_the_first_rank_that_comes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert reported_already("x")  # before the ranks have met, local rank 0 speaks
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not reported_already("x")
