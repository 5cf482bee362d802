"""Run functions in processes of their own, with a deadline: a broken driver or network may hang whoever asks it."""

import math
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lockstep.processes import proc
from lockstep.processes.signals import blocked, end_with_parent

Report = Callable[[str], None]
_START_S = 60.0  # for importing torch, on a loaded machine with cold files
_GRACE_S = 1.0  # for the others to report what they saw, after one failed
_ORDINARY = ("running", "sleeping")  # states that explain nothing
_CONTEXT = get_context("forkserver")


@dataclass
class Child:
    """What is known of a process at the end."""

    pid: int
    stage: str = "starting"  # the last one that it reported
    value: Any = None  # None: it gave no answer, or failed
    error: str = ""
    log: str = ""  # what its libraries printed
    state: str = ""  # of its process, where that explains its silence

    @property
    def well(self) -> bool:
        """True where it returned its value."""
        return self.value is not None

    @property
    def place(self) -> str:
        """Where it stood in the end."""
        return f"{self.stage}, {self.state}" if self.state else self.stage


def run(
    calls: Sequence[tuple[Any, ...]],
    seconds: float,
    environ: Mapping[str, str] = os.environ,
    started: Callable[[list[int]], None] = lambda _: None,
) -> list[Child]:
    """`fn(report, *args)` for each (fn, *args), at once, each in a process of its own; returns how each went.

    Args:
        calls: functions that report what they are about to do, and arguments that can be pickled.
        seconds: what they get together, from the moment when the last of them has started.
        environ: of the processes.
        started: is given the processes' ids.
    """
    _CONTEXT.set_forkserver_preload(["torch.distributed"])  # imported once, by the server that they are forked from
    resource_tracker.ensure_running()  # whose start would unblock the signal
    with blocked({signal.SIGINT}):  # else Ctrl-C while it imports shows its traceback
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder, ExitStack() as stack:
        children: dict[Connection, tuple[Child, BaseProcess]] = {}
        logs = [Path(folder, str(index)) for index in range(len(calls))]
        for log, call in zip(logs, calls, strict=True):
            here, there = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_call, args=(there, dict(environ), log, *call), daemon=True)
            process.start()
            for end in (here.close, process.join, process.kill):  # the last one comes first
                stack.callback(end)
            there.close()
            children[here] = Child(process.pid or 0), process
        found = [child for child, _ in children.values()]
        started([child.pid for child in found])
        _follow(children, seconds)
        for child, log in zip(found, logs, strict=True):
            child.log = log.read_text(errors="replace") if log.exists() else ""
            if not (child.well or child.error) and not (state := proc.state(child.pid)).startswith(_ORDINARY):
                child.state = state
    return found


def _follow(children: Mapping[Connection, tuple[Child, BaseProcess]], seconds: float) -> None:
    """Take in reports until all have ended, the deadline is over, or one failed and the others had time to see it."""
    waiting, unstarted = dict(children), set(children)
    deadline, grace = time.monotonic() + _START_S, math.inf
    while waiting:
        ready = waiting.keys() & wait(list(waiting), max(0.0, min(deadline, grace) - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            child, process = waiting[pipe]
            try:
                vars(child).update(pipe.recv())
            except EOFError:
                process.join(_GRACE_S)
                child.error = f"died with exit code {process.exitcode}"
            if child.well or child.error:
                del waiting[pipe]
            if child.error:
                grace = min(grace, time.monotonic() + _GRACE_S)
            elif pipe in unstarted:
                unstarted.remove(pipe)
                deadline = time.monotonic() + seconds


def _call(pipe: Connection, environ: dict[str, str], log: Path, fn: Callable[..., Any], *args: Any) -> None:
    """What a process does. What libraries print goes to a file: the terminal is the findings'."""
    end_with_parent()
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    except FileNotFoundError:  # Ctrl-C while this process was being made: nobody waits for it
        os._exit(0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update({"NCCL_DEBUG": "WARN", **environ})
    pipe.send({"stage": "starting"})
    try:
        answer = {"value": fn(lambda stage: pipe.send({"stage": stage}), *args)}
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": traceback.format_exception_only(error)[-1].strip()}
    pipe.send(answer)
    os._exit(0)  # an orderly goodbye would wait for the others, and gloo's threads outlive the group
