"""One run a folder, however many come at once and however the first one ends; and what the system refuses."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep.distributed import files
from lockstep.distributed.files import LOCK, hold, temporary_folder, try_lock, write_error
from lockstep.errors import UserError
from tests.subprocesses import lockstep, run_lockstep

LONG = ("train", "--epochs", "2000", "--nproc", "1", "--threads", "1", "--out", "run", "--log-every", "5")


def test_who_comes_second_is_told_who_has_it(tmp_path: Path) -> None:
    with hold(tmp_path):
        with pytest.raises(
            UserError, match=rf"is in use by another run: process {os.getpid()} on .*, since 20"
        ) as told:
            hold(tmp_path).__enter__()
        assert "--out" in told.value.remedy
    assert not list(tmp_path.iterdir())
    with hold(tmp_path):
        (tmp_path / LOCK).unlink()  # with the folder that no run came of
        with hold(tmp_path):
            pass
    (tmp_path / LOCK).mkdir()
    with pytest.raises(UserError, match="can't write"):
        hold(tmp_path).__enter__()


def test_who_comes_before_the_holder_has_said_its_name_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LOOKS", 1200)  # a thread on a busy machine may be late
    with (tmp_path / LOCK).open("w") as file:
        assert try_lock(file.fileno())
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": "2026-01-01 00:00:00"})
        timer = threading.Timer(0.2, (tmp_path / LOCK).write_text, (holder,))
        timer.start()
        with pytest.raises(UserError, match=rf"is in use by another run: process {os.getpid()} on .*, since 2026"):
            hold(tmp_path).__enter__()
        timer.join()


def test_who_comes_after_a_kill_waits_for_what_the_killed_one_leaves(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    file = (tmp_path / LOCK).open("w")
    assert try_lock(file.fileno())
    for pid, host in ((os.getpid(), socket.gethostname()), (gone.pid, "elsewhere")):
        (tmp_path / LOCK).write_text(json.dumps({"pid": pid, "host": host, "since": "2026-01-01 00:00:00"}))
        with pytest.raises(UserError, match="is in use by another run"):
            hold(tmp_path).__enter__()
    (tmp_path / LOCK).write_text(json.dumps({"pid": gone.pid, "host": socket.gethostname(), "since": "then"}))
    threading.Timer(0.3, file.close).start()
    with hold(tmp_path):
        assert file.closed


def test_a_file_system_without_locks_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(37, "No locks available")))
    with hold(tmp_path), hold(tmp_path):
        assert try_lock(0)


def test_of_runs_that_start_at_once_in_one_folder_one_trains(tmp_path: Path) -> None:
    commands = [lockstep(*LONG, cwd=tmp_path) for _ in range(3)]
    journal = tmp_path / "run/journal.jsonl"
    running = commands
    while len(running) > 1:
        time.sleep(0.02)
        running = [command for command in running if command.process.poll() is None]
    (winner,) = running
    winner.until(lambda: journal.exists() and '"kind": "step"' in journal.read_text())
    for command in commands:
        if command is not winner:
            ended = command.end()
            assert (ended.code, ended.orphans) == (2, ()), ended.text
            holder = f"process {winner.pid} on {socket.gethostname()}, since"
            assert f"run is in use by another run: {holder}" in ended.err
    winner.signal(signal.SIGKILL)  # its lock goes with it
    winner.end()
    steps = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [record["kind"] for record in steps].count("run") == 1
    again = run_lockstep(*LONG[:2], "1", *LONG[3:], "--resume", "never", cwd=tmp_path)
    assert "holds a run already" in again.err


def test_temporary_folders_are_private_and_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("chaos-") as folder:
        assert Path(folder).name.startswith("lockstep-chaos-")
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no place for temporary files: No such file(.|\n)*TMPDIR"), temporary_folder():
        pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EFBIG, "File too large"), "File too large\n.*ulimit -f"),
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), "too large.*\n.*ulimit -f"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "No space left.*\n.*[Ff]ree some space"),
        (OSError("the library says no more"), "the library says no more\n"),
    ],
)
def test_a_refused_write_says_what_to_do_whoever_tells(error: Exception, said: str) -> None:
    assert re.search(said, str(write_error(Path("run/weights"), error)))
