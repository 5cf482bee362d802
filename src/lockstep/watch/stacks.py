"""Python stacks of the processes of this machine, through faulthandler."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback

from lockstep.processes import proc

_NAME = "lockstep-stacks"  # of the file in memory that a process writes its stacks to
_SIGNAL = getattr(signal, "SIGUSR2", None)
_ANSWER_S = 0.3  # what a process gets to write its stacks; one that is stopped never does
_LONGEST = 12_000  # characters of one process's stacks


def dump_on_signal() -> None:
    """Let this process write the stacks of its threads to a file in memory on SIGUSR2, for `stacks_of` of another one.

    faulthandler does it inside the signal's handler, so it works also where a C call holds the interpreter's lock. A
    handler that somebody set before stays, and nothing happens on systems without files in memory (other than Linux).
    """
    if _SIGNAL is None or not hasattr(os, "memfd_create") or signal.getsignal(_SIGNAL) != signal.SIG_DFL:
        return
    if proc.descriptor("self", _NAME):  # faulthandler's handlers are not among Python's
        return
    # stays open to the end of the process; programs that this one starts do not inherit it
    faulthandler.register(_SIGNAL, file=os.memfd_create(_NAME), all_threads=True)


def stacks_of(pid: int) -> str:
    """The stacks of another process of ours that called `dump_on_signal`; empty where it does not answer.

    The thread that got the signal, as a rule the main one, comes first.
    """
    path = proc.descriptor(pid, _NAME)
    if path is None or _SIGNAL is None or not proc.catches(pid, _SIGNAL):  # it would end one that has no handler
        return ""
    try:
        before = path.stat().st_size
        os.kill(pid, _SIGNAL)
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


def own_stacks() -> str:
    """The stacks of this process's threads but the heartbeat's, as faulthandler writes them; the main one first."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        parts = file.read().decode(errors="replace").strip().split("\n\n")
    ident = f"{threading.main_thread().ident:x}"
    main = [part for part in parts if ident in part.partition("\n")[0]]
    left_out = (f"watch{os.sep}heartbeat.py", "<no Python frame>")
    others = [part for part in parts if part not in main and not any(text in part for text in left_out)]
    return "\n\n".join(main + others)[:_LONGEST]


def main_frames() -> list[tuple[str, int, str]]:
    """(file, line, function) of the main thread's Python frames, the innermost first."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.walk_stack(innermost) if innermost else ()  # without one it would walk its caller's
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


def loader_workers() -> list[str]:
    """What each process that this one started by multiprocessing is doing, with its stacks where it gives them."""
    return [
        f"{child.name} (pid {child.pid}) is {proc.state(child.pid)}\n{stacks_of(child.pid)}".strip()
        for child in multiprocessing.active_children()
        if child.pid is not None
    ]
