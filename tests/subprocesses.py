"""Run commands in processes of their own, with a deadline, and find what they leave behind.

`lockstep` and `run_lockstep` fork them from a server that has imported torch (tests/warm.py); with `fresh=True` the
interpreter is executed, as by a user. So are the commands of `Command`, unless it is told `warm=True`.
"""

import os
import select
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

from tests.warm import server

_MARK = "LOCKSTEP_TEST_MARK"  # inherited by every descendant, also by one that was given a new parent
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Completed:
    """What a command came to."""

    code: int
    out: str
    err: str
    orphans: tuple[str, ...]  # command lines of processes that outlived it; they are killed

    @property
    def text(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}\n--- orphans\n{self.orphans}"


class Forked:
    """A child of this process that subprocess did not start; of Popen what is needed here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ends = os.pidfd_open(pid)  # can be read from the process's end on

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self.returncode if self.returncode is not None else self._reap(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, awaited.

        Raises:
            subprocess.TimeoutExpired: where it is not over in `timeout` seconds.
        """
        code = self.returncode if self.returncode is not None else self._reap(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def kill(self) -> None:
        """Send it SIGKILL, if it is still there."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, timeout: float | None) -> int | None:
        if select.select([self._ends], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._ends)
        return self.returncode


UNENDED: list["Command"] = []  # a test that fails leaves its own here, for tests/conftest.py


class Command:
    """A started command in its own process group; `end` waits for it."""

    def __init__(
        self,
        *argv: str,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdout: int | None = None,
        warm: bool = False,
    ) -> None:
        self.mark = f"{_MARK}={uuid.uuid4().hex}"
        inherited = {k: v for k, v in os.environ.items() if k not in (*_LAUNCHER, "LOCKSTEP_DATA")}
        env = {**inherited, "PYTHONWARNINGS": "error", **dict([self.mark.split("=")]), **(env or {})}
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        out = self.out.fileno() if stdout is None else stdout
        self.process: Forked | subprocess.Popen[bytes]
        with Path(os.devnull).open() as nothing:
            if warm and server().serves(argv[1:], env):
                fds = {0: nothing.fileno(), 1: out, 2: self.err.fileno()}
                self.process = Forked(server().start(argv[1:], fds, env, str(cwd or Path.cwd()), session=True))
            else:
                self.process = subprocess.Popen(
                    argv, cwd=cwd, env=env, stdin=nothing, stdout=out, stderr=self.err, start_new_session=True
                )
        UNENDED.append(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    def family(self) -> dict[int, str]:
        """Living processes of this command's session or with its mark: pid -> command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                marked = self.mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                if state == "Z" or not (marked or int(session) == self.pid):
                    continue
                name, line = ((entry / file).read_text() for file in ("comm", "cmdline"))
                found[int(entry.name)] = (
                    name.strip() if name.startswith(("warm ", "lockstep ")) else line.replace("\0", " ").strip()
                )
            except OSError:  # gone in the meantime
                continue
        return found

    def said(self) -> str:
        """What is on its standard output so far."""
        return os.pread(self.out.fileno(), 1 << 20, 0).decode()  # without moving the offset, which the command shares

    def workers(self) -> list[int]:
        """The workers of its launcher, by rank; where it has none, processes of multiprocessing's spawn method."""
        family = self.family()
        ranks = {int(line.split()[-1]): pid for pid, line in family.items() if line.startswith("lockstep rank ")}
        return [ranks[rank] for rank in sorted(ranks)] or [pid for pid in family if "spawn_main" in family[pid]]

    def until(self, condition: Callable[[], Any], timeout: float = 180.0) -> Any:
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

    def end(self, timeout: float = 60.0, grace: float = 3.0) -> Completed:
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
        UNENDED.remove(self)
        return Completed(code, texts[0], texts[1], tuple(left.values()))


def lockstep(*args: str, cwd: Path, env: dict[str, str] | None = None, fresh: bool = False) -> Command:
    """Start `python -m lockstep ARGS`."""
    return Command(sys.executable, "-m", "lockstep", *args, cwd=cwd, env=env, warm=not fresh)


def run_lockstep(
    *args: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 60.0, fresh: bool = False
) -> Completed:
    """`python -m lockstep ARGS`, ended."""
    return lockstep(*args, cwd=cwd, env=env, fresh=fresh).end(timeout)
