"""Writing in the background: what is kept is the moment of the call, and a failure costs nothing but that write."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.checkpoint import store
from lockstep.checkpoint.format import MANIFEST, FileRecord
from lockstep.checkpoint.restore import restore
from lockstep.checkpoint.store import folder_name, list_checkpoints
from lockstep.checkpoint.writer import Writer
from lockstep.errors import UserError
from tests.checkpoint.moments import OPTIMIZERS, bits, good, model, tiny, train

WRITE_FILE = store._write_file


class Gate:
    """A slow disk: a write stops before its manifest until it is let through."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def write_file(self, path: Path, chunks: Any) -> FileRecord:
        if path.name == MANIFEST:
            self.reached.set()
            assert self.open.wait(60)
        return WRITE_FILE(path, chunks)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(store, "_write_file", gate.write_file)
    yield gate
    gate.open.set()


def test_training_goes_on_while_a_slow_disk_takes_the_moment_of_the_call(tmp_path: Path, gate: Gate) -> None:
    net = model(channels_last=True)
    optimizer = OPTIMIZERS["adam"](list(net.parameters()))
    writer = Writer(tmp_path / "checkpoints", keep=2)
    train(net, optimizer, 0, 2)
    expected = bits(net.state_dict()), bits(optimizer.state_dict())
    state = {"samples": [8]}
    assert writer.save(2, net, optimizer, state=state) > 0
    assert gate.reached.wait(60)
    state["samples"][0] = 99
    train(net, optimizer, 2, 5)
    assert writer.busy
    assert writer.finished() == []
    assert list_checkpoints(tmp_path / "checkpoints") == {}, "nothing has its name before it is whole"
    gate.open.set()
    writer.close()
    assert not writer.busy
    (saved,) = writer.finished()  # type: ignore[unreachable]  # mypy has it busy as before
    assert saved["step"] == 2
    assert saved["durable_ms"] >= saved["stall_ms"] > 0
    assert set(saved) == {"kind", "step", "digest", "checksum", "bytes", "stall_ms", "durable_ms"}
    assert writer.finished() == []
    loaded = good(tmp_path / "checkpoints", {2: saved["digest"]})
    fresh = model(1, channels_last=True)
    other = OPTIMIZERS["adam"](list(fresh.parameters()))
    assert restore(loaded, fresh, other) == {"samples": [8]}
    assert (bits(fresh.state_dict()), bits(other.state_dict())) == expected


def test_one_write_at_a_time_and_the_wait_is_part_of_the_stall(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, keep=5)
    writer.save(1, *tiny(1))
    assert gate.reached.wait(60)
    waits: list[float] = []  # when the second one's began
    calls: list[float] = []  # the ms that it says it took
    wait = writer._wait

    def noted(timeout_s: float) -> None:
        waits.append(time.perf_counter())
        wait(timeout_s)

    def second() -> None:
        calls.append(writer.save(2, *tiny(2)))

    monkeypatch.setattr(writer, "_wait", noted)

    other = threading.Thread(target=second)
    other.start()
    other.join(0.2)
    assert calls == [], "the buffers are the first one's still"
    released = time.perf_counter()
    gate.open.set()
    other.join(60)
    (began, *_), (took,) = waits, calls
    writer.close()
    first, later = writer.finished()
    assert (first["step"], later["step"]) == (1, 2)
    assert round(took, 3) >= later["stall_ms"] >= (released - began) * 1000
    assert list(list_checkpoints(tmp_path)) == [1, 2]


def test_older_ones_are_pruned_after_the_write(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=2)
    for step in range(1, 6):
        writer.save(step, *tiny(step), best=2 if step >= 2 else None)
    writer.close()
    assert list(list_checkpoints(tmp_path)) == [2, 4, 5]
    assert [saved["step"] for saved in writer.finished()] == [1, 2, 3, 4, 5]


def test_a_failed_write_is_told_costs_nothing_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, keep=1)
    writer.save(1, *tiny(1))
    writer.close()
    assert writer.failure() is None

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        for step in (2, 3):
            writer.save(step, *tiny(step))
        with pytest.raises(UserError, match="step-000000003: No space left on device"):
            writer.close()
    assert writer.failure() is None, "told once"
    assert [path.name for path in tmp_path.iterdir()] == [folder_name(1)]
    assert [saved["step"] for saved in writer.finished()] == [1]
    writer.save(4, *tiny(4))
    writer.close()
    assert list(list_checkpoints(tmp_path)) == [4]


def test_a_failure_can_be_asked_for_without_waiting(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "gone" / "checkpoints", keep=1)
    writer.close()
    assert not (tmp_path / "gone").exists(), "closing without a write is nothing"
    writer.save(1, *tiny(1))
    writer._wait(60)
    error = writer.failure()
    assert isinstance(error, UserError)
    assert "gone/checkpoints" in error.message
    writer.close()


def test_pruning_that_fails_is_told_and_the_checkpoint_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_remove", Mock(side_effect=OSError(errno.EACCES, os.strerror(errno.EACCES))))
    writer = Writer(tmp_path, keep=1)
    writer.save(1, *tiny(1))
    writer.save(2, *tiny(2))
    with pytest.raises(UserError, match=r"\(remove\) the old checkpoint .*step-000000001: Permission denied"):
        writer.close()
    assert [saved["step"] for saved in writer.finished()] == [1, 2]


def test_a_disk_that_never_answers_does_not_hold_training_for_ever(tmp_path: Path, gate: Gate) -> None:
    writer = Writer(tmp_path, keep=1, timeout_s=0.05)
    writer.save(1, *tiny(1))
    for waits in (lambda: writer.save(2, *tiny(2)), writer.close):
        with pytest.raises(UserError, match=r"the checkpoint of step 1 is not on disk after 0\.05 s in"):
            waits()
    gate.open.set()
    writer.close(60)
    assert list(list_checkpoints(tmp_path)) == [1], "it came after all"


def test_a_thread_that_cannot_start_is_named_and_the_end_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = tiny(1.0)
    writer = Writer(tmp_path / "checkpoints", keep=2)
    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(UserError, match="the checkpoint of step 1 can't be written: can't start new thread"):
            writer.save(1, net, optimizer)
    writer.close()
    writer.save(2, net, optimizer)
    writer.close()
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [2]
