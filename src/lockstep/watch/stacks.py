"""Where processes of this machine are: their Python stacks, through faulthandler."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time

from lockstep.processes import proc

_NAME = "lockstep-stacks"  # of the file in memory that a process writes its stacks to
_ASK = getattr(signal, "SIGUSR2", None)
_ANSWER_S = 0.3  # what a process gets to write its stacks; one that is stopped never does
_LONGEST = 12_000  # characters of one process's stacks


def answer_for_stacks() -> None:
    """Let this process write the stacks of its threads to a file in memory on SIGUSR2, for `stacks_of` of another one.

    faulthandler does it inside the signal's handler, so it works also where a C call holds the interpreter's lock. A
    handler that somebody set before stays, and nothing happens on systems without files in memory (other than Linux).
    """
    if _ASK is None or not hasattr(os, "memfd_create") or signal.getsignal(_ASK) != signal.SIG_DFL:
        return
    if proc.descriptor("self", _NAME):  # faulthandler's handlers are not among Python's
        return
    # stays open to the end of the process; programs that this one starts do not inherit it
    faulthandler.register(_ASK, file=os.memfd_create(_NAME), all_threads=True)


def stacks_of(pid: int) -> str:
    """The stacks of another process of ours that called `answer_for_stacks`; empty where it does not answer.

    The thread that heard the signal, as a rule the main one, comes first.
    """
    path = proc.descriptor(pid, _NAME)
    if path is None or _ASK is None or not proc.catches(pid, _ASK):  # the signal would end one that has no handler
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


def children() -> list[str]:
    """For each process that this one started by multiprocessing (loader workers) a line, and its stacks if it tells."""
    lines = []
    for child in multiprocessing.active_children():
        if child.pid is not None:
            lines.append(f"{child.name} (pid {child.pid}) is {proc.state(child.pid)}\n{stacks_of(child.pid)}".strip())
    return lines
