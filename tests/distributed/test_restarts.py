"""Restarts by the launcher: what is killed or hangs comes back by itself, and ends as if nothing had been."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.journals import read
from tests.subprocesses import Command, lockstep

FLAGS = ("train", "--threads", "1", "--exact", "2", "--checkpoint-every", "20steps", "--log-every", "5")


def records(folder: Path) -> list[dict[str, Any]]:
    """Those of the journal, if there is one."""
    return read(folder / "journal.jsonl") if (folder / "journal.jsonl").exists() else []


def steps_after(command: Command, folder: Path, starts: int, kind: str = "step") -> None:
    """Wait until the run has begun so many times and has then left a record of a kind."""

    def reached() -> bool:
        found = [record["kind"] for record in records(folder)]
        begun = [place for place, each in enumerate(found) if each == "run"]
        return len(begun) >= starts and kind in found[begun[starts - 1] :]

    command.until(reached, 120)


@pytest.mark.slow
def test_a_rank_that_hangs_is_started_again(tmp_path: Path) -> None:
    flags = ("--nproc", "2", "--epochs", "40", "--hang-timeout", "4", "--out", "run")
    command = lockstep(*FLAGS, *flags, cwd=tmp_path)
    steps_after(command, tmp_path / "run", 1, "checkpoint")
    command.signal(signal.SIGSTOP, command.workers()[0])
    steps_after(command, tmp_path / "run", 2)
    command.signal(signal.SIGTERM)
    ended = command.end(180)
    assert (ended.code, ended.orphans) == (143, ()), ended.text
    assert re.search(r"no progress for --hang-timeout.*restart 1 of 3 on 2 process", ended.err, re.DOTALL)
    assert "hang" in [record.get("fault") for record in records(tmp_path / "run")]


@pytest.mark.slow
def test_where_a_restart_got_no_further_as_many_begin_again(tmp_path: Path) -> None:
    flags = ("--nproc", "2", "--epochs", "1000", "--out", "run")
    command = lockstep(*FLAGS[:-4], "--checkpoint-every", "0", "--log-every", "5", *flags, cwd=tmp_path)
    for start in (1, 2):
        steps_after(command, tmp_path / "run", start)
        command.signal(signal.SIGKILL, command.workers()[0])
    steps_after(command, tmp_path / "run", 3)
    command.signal(signal.SIGTERM)
    ended = command.end(180)
    assert (ended.code, ended.orphans) == (143, ()), ended.text
    assert "restart 2 of 3 on 2 process(es)" in ended.err
    assert records(tmp_path / "run")[-1]["processes"] == 2
