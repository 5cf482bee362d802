"""Run the real command in processes of its own, with a deadline, and find what it leaves behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MARK = "LOCKSTEP_TEST_MARK"  # inherited by every descendant, also by one that was given a new parent
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    out: str
    err: str
    orphans: tuple[str, ...]  # command lines of processes that outlived it; they are killed

    @property
    def text(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}\n--- orphans\n{self.orphans}"


class Command:
    """A started command in its own process group; `end` waits for it."""

    def __init__(
        self, *argv: str, cwd: Path | None = None, env: dict[str, str] | None = None, stdout: int | None = None
    ) -> None:
        self.mark = f"{_MARK}={uuid.uuid4().hex}"
        inherited = {k: v for k, v in os.environ.items() if k not in (*_LAUNCHER, "LOCKSTEP_DATA")}
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**inherited, "PYTHONWARNINGS": "error", **dict([self.mark.split("=")]), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self.out if stdout is None else stdout,
            stderr=self.err,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def family(self) -> dict[int, str]:
        """Living processes that carry this command's mark: pid -> command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # gone in the meantime
                continue
        return found

    def said(self) -> str:
        """What is on its standard output so far."""
        return os.pread(self.out.fileno(), 1 << 20, 0).decode()  # without moving the offset, which the command shares

    def workers(self) -> list[int]:
        """Processes of the spawn method, in the order of their start: the local ranks."""
        return sorted(pid for pid, line in self.family().items() if "spawn_main" in line and pid != self.pid)

    def until(self, condition: Callable[[], Any], timeout: float = 60.0) -> Any:
        """Wait for a condition of the running command; returns its value."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the condition never came true: {self.end().text}")
            time.sleep(0.02)
        return value

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def signal(self, number: signal.Signals, pid: int | None = None) -> None:
        """Signal one of the command's processes: itself, or one of `workers()`."""
        assert pid is None or pid in self.family()
        os.kill(pid or self.pid, number)

    def end(self, timeout: float = 60.0, grace: float = 3.0) -> Ended:
        """Wait at most `timeout` seconds (then it is killed: code -9); what lives `grace` s later is an orphan."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        deadline = time.monotonic() + grace
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read())
            file.close()
        return Ended(code, texts[0], texts[1], tuple(left.values()))


def lockstep(*args: str, cwd: Path, env: dict[str, str] | None = None) -> Command:
    """Start `python -m lockstep ARGS`."""
    return Command(sys.executable, "-m", "lockstep", *args, cwd=cwd, env=env)


def run_lockstep(*args: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 60.0) -> Ended:
    """`python -m lockstep ARGS`, ended."""
    return lockstep(*args, cwd=cwd, env=env).end(timeout)
