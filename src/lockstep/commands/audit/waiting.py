"""Who waits where: the Python stack of each process, written when the starter asks for it. Imports no torch.

Asked for by a signal, whose handler is faulthandler's: it runs while the main thread waits inside C, where no handler
in Python would, and needs neither a thread nor the interpreter's lock.
"""

import ctypes
import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import TextIO

from lockstep.commands.audit.plan import Plan

SIGNAL = signal.SIGRTMIN + 7  # of none of the usual schedulers and launchers
_ANSWER_S = 10.0  # that a process has for writing its stack: on a busy machine, milliseconds otherwise
_HEAD = "Stack (most recent call first):"  # faulthandler's
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_keep: list[TextIO] = []  # faulthandler writes to the descriptor, and holds no file


def install(plan: Plan) -> None:
    """Have this process write its stack, to a file of its own in the folder of events, whenever it is asked to."""
    path = Path(plan.events) / f"{os.getpid()}.registering"
    _keep.append(path.open("w", encoding="utf-8"))
    signal.signal(SIGNAL, signal.SIG_IGN)  # what faulthandler puts back when the interpreter ends: else it would kill
    faulthandler.register(SIGNAL, file=_keep[-1], all_threads=False)
    path.rename(path.with_suffix(".stack"))  # who has one may be asked: without a handler the signal would kill


def ask(folder: Path, alive: set[int]) -> None:
    """Ask the processes of a folder of events that are alive for their stacks, and wait until they are written.

    Each is asked twice, as real-time signals queue: a stack comes line by line, and is whole when a second one begins.
    The main thread itself is asked: what is sent to a process any thread may get, and gloo's have no Python stack.
    """
    asked = [path for path in folder.glob("*.stack") if int(path.stem) in alive]
    for path in (*asked, *asked):
        ctypes.CDLL(None).tgkill(int(path.stem), int(path.stem), SIGNAL)
    deadline = time.monotonic() + _ANSWER_S
    while any(_read(path).count(_HEAD) < 2 for path in asked) and time.monotonic() < deadline:
        time.sleep(0.02)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def stacks(folder: Path, home: str) -> dict[int, dict[str, list[str]]]:
    """By process id `stack` (the user's lines) and `inside` (what the innermost of them called), the innermost first.

    Only of processes that were asked, and could answer.
    """
    found, begins = {}, f"{home.rstrip('/')}/"
    for path in folder.glob("*.stack"):
        _, _, text = _read(path).partition(_HEAD)
        frames = _FRAME.findall(text.partition(_HEAD)[0])
        users = [place for place, (name, _, _) in enumerate(frames) if name.startswith(begins)]
        if frames:
            first = users[0] if users else len(frames)
            found[int(path.stem)] = {
                "stack": [f"{frames[place][0].removeprefix(begins)}:{frames[place][1]}" for place in users],
                "inside": [function for _, _, function in frames[:first]],
            }
    return found
