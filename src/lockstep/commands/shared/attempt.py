"""One call of `lockstep train` in a process of its own, watched through its journal."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from lockstep.commands.shared.arguments import train_arguments
from lockstep.config import Config
from lockstep.processes.proc import alive
from lockstep.watch.journal import Record, read

_PATIENCE_S = 120.0  # for a start, a step or a recovery: beyond it the run counts as lost
_POLL_S = 0.002


class Lost(Exception):
    """A run did not come back."""


class Attempt:
    """One call of the command, and its run folder."""

    def __init__(self, config: Config, folder: Path, log: Callable[[str], None]) -> None:
        self.folder, self.log = folder, log
        command = [sys.executable, "-m", "lockstep", *train_arguments(config.with_execution(out=str(folder)))]
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill_all)
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self._read: tuple[int, list[Record]] = (0, [])

    def journal(self) -> list[Record]:
        """The records so far; read again only where the file has grown."""
        path = self.folder / "journal.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._read[0]:
            self._read = size, read(path)
        return self._read[1]

    def pids(self) -> list[int]:
        """The processes of the newest attempt, by rank."""
        runs = [r for r in self.journal() if r["kind"] == "run"]
        return list(runs[-1]["pids"]) if runs else []

    def writing(self) -> bool:
        """True while a checkpoint is being written."""
        return any((self.folder / "checkpoints").glob(".writing-*"))

    def wait_for(self, true_of: Callable[[list[Record]], bool], what: str) -> float:
        """Wait until something is true of the journal; returns the moment."""
        for _ in self._polls(what):
            if true_of(self.journal()):
                return time.monotonic()
            if self.process.poll() is not None and not true_of(self.journal()):
                raise Lost(f"the command ended ({self.process.returncode}) before {what}: {self._said()}")
        raise AssertionError("unreachable")

    def wait_for_step(self) -> bool:
        """Wait until the newest attempt has taken a step; False where the run is complete instead."""
        runs = max(1, sum(r["kind"] == "run" for r in self.journal()))
        self.wait_for(lambda new: stepped(new, runs), "a step")
        return bool(self.journal()[-1]["kind"] != "end")

    def wait_for_moment(self, draw: random.Random, while_writing: bool) -> bool:
        """Wait for a random moment, or for a checkpoint being written; False where the run ended meanwhile."""
        until = time.monotonic() + draw.uniform(0.0, 1.5)
        for _ in self._polls("its end"):
            if self.process.poll() is not None or self.journal()[-1]["kind"] == "end":
                return False
            if self.writing() if while_writing else time.monotonic() >= until:
                return True
        return False

    def wait_until_gone(self, pids: list[int]) -> None:
        """Wait until none of the processes runs any more."""
        for _ in self._polls("all processes were gone"):
            if not any(alive(pid) for pid in pids):
                return

    def finish(self) -> None:
        """Wait for the end of the run."""
        for _ in self._polls("the end"):
            if self.process.poll() is not None:
                break
        if self.process.returncode != 0:
            raise Lost(f"exit code {self.process.returncode}: {self._said()}")

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for pid in self.pids() if self.process.poll() is None else []:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.output.close()

    def _polls(self, what: str) -> Iterator[None]:
        deadline, steps = time.monotonic() + _PATIENCE_S, -1
        while time.monotonic() < deadline:
            yield
            if (now := len(self.journal())) != steps:  # it moves: patience starts anew
                deadline, steps = time.monotonic() + _PATIENCE_S, now
            time.sleep(_POLL_S)
        raise Lost(f"no progress in {_PATIENCE_S:.0f} s, waiting for {what}: {self._said()}")

    def _said(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-2000:]


def stepped(records: list[Record], runs: int) -> bool:
    """True where attempt number `runs` has taken a step, or ended."""
    seen = 0
    for record in records:
        seen += record["kind"] == "run"
        if seen >= runs and record["kind"] in ("step", "end"):
            return True
    return False
