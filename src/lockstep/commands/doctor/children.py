"""Start a few ranks in processes of their own, hear how far each comes, and end them in time."""

import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lockstep.processes import proc
from lockstep.processes.signals import end_with_parent, launching

Tell = Callable[[str], None]
_START_S = 60.0  # for importing torch, on a loaded machine with cold files
_GRACE_S = 1.0  # for the others to say what they saw, after a rank failed
_CONTEXT = get_context("forkserver")


@dataclass
class Heard:
    """What is known of a rank at the end."""

    pid: int
    stage: str = "starting"  # what it last said that it would do
    value: Any = None
    error: str = ""  # of its own; empty where it ended well, or did not answer
    log: str = ""  # what its libraries printed
    state: str = ""  # of its process, where that explains its silence
    ended: bool = False

    @property
    def well(self) -> bool:
        """True where it returned its value."""
        return self.ended and not self.error


def prepare() -> None:
    """Start the server that ranks are forked from; it imports torch meanwhile, once."""
    from multiprocessing.forkserver import ensure_running

    _CONTEXT.set_forkserver_preload(["torch.distributed"])
    with launching():  # else Ctrl-C while it imports shows its traceback
        ensure_running()


def run(
    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
    seconds: float,
    environ: Mapping[str, str] = os.environ,
    started: Callable[[list[int]], None] = lambda _: None,
) -> list[Heard]:
    """`fn(tell, *args)` for each call, at once, each in a process of its own; returns what was heard of each.

    Args:
        calls: functions that can be pickled, with their arguments.
        seconds: what they get together, from the moment when the last of them has started.
        environ: of the processes.
        started: is given the processes' ids.
    """
    prepare()
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        processes, pipes = [], list[Connection]()
        try:
            for index, (fn, args) in enumerate(calls):
                here, there = _CONTEXT.Pipe()
                arguments = (there, dict(environ), str(Path(folder, str(index))), fn, args)
                process = _CONTEXT.Process(target=_life, args=arguments, daemon=True)
                process.start()
                there.close()
                processes.append(process)
                pipes.append(here)
            heard = [Heard(process.pid or 0) for process in processes]
            started([one.pid for one in heard])
            _listen(heard, pipes, seconds)
            for one, process in zip(heard, processes, strict=True):
                if not one.ended:
                    one.state = _state(one.pid)
                elif one.error == _DEAD:
                    process.join(_GRACE_S)
                    one.error = f"died with exit code {process.exitcode}" if process.exitcode else _DEAD
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
        for index, one in enumerate(heard):
            log = Path(folder, str(index))
            one.log = log.read_text(errors="replace") if log.exists() else ""
    return heard


_DEAD = "died without a word"


def _listen(heard: list[Heard], pipes: list[Connection], seconds: float) -> None:
    """Take in what the ranks say until all have ended, the deadline is over, or one failed and the others had time."""
    waiting = dict(zip(pipes, heard, strict=True))
    deadline, grace = time.monotonic() + _START_S, math.inf
    unstarted = set(waiting)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, min(deadline, grace) - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            one = waiting[pipe]
            try:
                kind, what = pipe.recv()
            except EOFError:
                kind, what = "error", _DEAD
            if kind == "stage":
                one.stage = what
                if pipe in unstarted:  # the time runs from the last one's start
                    unstarted.discard(pipe)
                    deadline = time.monotonic() + seconds
                continue
            one.ended = True
            one.value, one.error = (what, "") if kind == "value" else (None, what)
            del waiting[pipe]
            if one.error:
                grace = min(grace, time.monotonic() + _GRACE_S)


def _state(pid: int) -> str:
    """What its process is doing, where that explains its silence: not that it runs, or sleeps until something comes."""
    state = proc.state(pid)
    return "" if state.startswith(("running", "sleeping")) else state


def _life(pipe: Connection, environ: dict[str, str], log: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """What a rank's process does. What libraries print goes to a file: the terminal is the findings'."""
    end_with_parent()
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except FileNotFoundError:  # Ctrl-C while this process was being made: nobody waits for it
        os._exit(0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update({"NCCL_DEBUG": "WARN", **environ})
    pipe.send(("stage", "starting"))
    try:
        answer = "value", fn(lambda stage: pipe.send(("stage", stage)), *args)
    except BaseException as error:
        traceback.print_exc()
        answer = "error", traceback.format_exception_only(error)[-1].strip()
    pipe.send(answer)
    os._exit(0)  # an orderly goodbye would wait for the others, and gloo's threads outlive the group
