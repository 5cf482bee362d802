"""Where processes of this machine are: their Python stacks through faulthandler, their state through /proc."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

_NAME = "lockstep-stacks"  # of the file in memory that a process writes its stacks to
_ASK = getattr(signal, "SIGUSR2", None)
_ANSWER_S = 0.3  # what a process gets to write its stacks; one that is stopped never does
_LONGEST = 12_000  # characters of one process's stacks
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a driver, uninterruptibly",
    "I": "idle",
    "T": "stopped by a signal (SIGSTOP, Ctrl-Z)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
GONE = "gone: no such process any more"


def answer_for_stacks() -> None:
    """Let this process write the stacks of its threads to a file in memory on SIGUSR2, for `stacks_of` of another one.

    faulthandler does it inside the signal's handler, so it works also where a C call holds the interpreter's lock. A
    handler that somebody set before stays, and nothing happens on systems without files in memory (other than Linux).
    """
    if _ASK is None or not hasattr(os, "memfd_create") or signal.getsignal(_ASK) != signal.SIG_DFL:
        return
    if _memory_file("self"):  # faulthandler's handlers are not among Python's
        return
    # stays open to the end of the process; programs that this one starts do not inherit it
    faulthandler.register(_ASK, file=os.memfd_create(_NAME), all_threads=True)


def stacks_of(pid: int) -> str:
    """The stacks of another process of ours that called `answer_for_stacks`; empty where it does not answer.

    The thread that heard the signal, as a rule the main one, comes first.
    """
    path = _memory_file(str(pid))
    if path is None or _ASK is None or not _catches(pid, _ASK):  # the signal would end one that has no handler
        return ""
    try:
        before = path.stat().st_size
        os.kill(pid, _ASK)
        size, deadline = before, time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            grown = path.stat().st_size
            if grown > before and grown == size:  # it has stopped writing
                break
            size = grown
        parts = path.read_bytes()[before:].decode(errors="replace").strip().split("\n\n")
        return "\n\n".join(sorted(parts, key=lambda part: not part.startswith("Current thread")))[:_LONGEST]
    except OSError:  # it ended meanwhile
        return ""


def own_stacks(first: int) -> str:
    """The stacks of this process's threads, as faulthandler writes them, without those that watch.

    The thread with the ident `first` comes before the others.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        parts = file.read().decode(errors="replace").strip().split("\n\n")
    mine = {part: f"{first:x}" in part.partition("\n")[0] for part in parts}
    watching = (f"watch{os.sep}heartbeat.py", "<no Python frame>")
    chosen = [part for part in parts if mine[part] or not any(text in part for text in watching)]
    chosen.sort(key=lambda part: not mine[part])
    return "\n\n".join(chosen)[:_LONGEST]


def frames(thread: int) -> list[tuple[str, int, str]]:
    """(file, line, function) of a thread's Python frames, the innermost first."""
    found, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def main_thread() -> int:
    """The ident of this process's main thread."""
    return threading.main_thread().ident or 0


def machine() -> str:
    """What two processes share that see each other's pids: the host and its pid namespace."""
    try:
        return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"
    except (OSError, AttributeError):
        return f"{os.getpid()} alone"  # nothing can be seen of others here


def born(pid: int) -> int:
    """When a process started, in clock ticks since the machine did; tells apart a later one of its pid. 0: unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def state(pid: int, since: int = 0) -> str:
    """What a process of this machine is doing, in words. `since`: its `born`, where known."""
    if not Path("/proc/self/stat").exists():
        return "state unknown on this system"
    fields = _stat(pid)
    if not fields or (since and int(fields[19]) != since):
        return GONE
    words = _STATES.get(fields[0], f"in state {fields[0]}")
    with suppress(OSError):
        channel = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip()
        if fields[0] in "SD" and channel not in ("", "0"):
            words += f" in {channel}"
    return words


def wake(pid: int, since: int) -> None:
    """Let a process of this machine go on that a signal stopped. `since`: its `born`."""
    fields = _stat(pid)
    if fields and fields[0] == "T" and int(fields[19]) == since:
        with suppress(OSError):  # it ended meanwhile
            os.kill(pid, signal.SIGCONT)


def children() -> list[str]:
    """For each process that this one started by multiprocessing (loader workers) a line, and its stacks if it tells."""
    lines = []
    for child in multiprocessing.active_children():
        if child.pid is not None:
            lines.append(f"{child.name} (pid {child.pid}) is {state(child.pid)}\n{stacks_of(child.pid)}".strip())
    return lines


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third (state) on; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _memory_file(pid: str) -> Path | None:
    with suppress(OSError):  # gone, or another user's
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if _NAME in str(entry.readlink()):
                    return entry
    return None


def _catches(pid: int, number: int) -> bool:
    """True where a process has a handler for a signal."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
