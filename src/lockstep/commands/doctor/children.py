"""Run generators in processes of their own, with a deadline: a broken driver, disk or network may hang who asks it."""

import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.distributed import proc
from lockstep.distributed.signals import end_with_parent

_START_S = 60.0  # for importing torch, on a loaded machine with cold files
_GRACE_S = 1.0  # for the others to say what they saw, after one failed
_CONTEXT = get_context("forkserver")


@dataclass
class Child:
    """What is known of a process at the end."""

    process: BaseProcess
    stage: str = "starting"  # the last text that it yielded
    values: list[Any] = field(default_factory=list)  # all else that it yielded
    error: str = ""
    done: bool = False


def run(calls: Sequence[tuple[Any, ...]], seconds: float, environ: Mapping[str, str] = os.environ) -> list[Child]:
    """Exhaust `fn(*args)` for each (fn, *args), at once, each in a process of its own; returns how each went.

    The generators yield a text for what they do next, and what they find. `seconds` is what they get together, from
    the moment when the last of them has started.
    """
    _CONTEXT.set_forkserver_preload(["torch.distributed"])  # imported once, by the server that they are forked from
    with ExitStack() as stack:
        children: dict[Connection, Child] = {}
        for call in calls:
            here, there = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_call, args=(there, dict(environ), *call), daemon=True)
            process.start()
            for end in (here.close, process.join, process.kill):  # the last one comes first
                stack.callback(end)
            there.close()
            children[here] = Child(process)
        _receive(children, seconds)
        for child in children.values():
            state = proc.state(child.process.pid or 0)
            if not (child.done or child.error or state.startswith(("running", "sleeping"))):
                child.stage += f", {state}"
        return list(children.values())


def _receive(children: Mapping[Connection, Child], seconds: float) -> None:
    """Take in what they say until all have ended, the deadline is over, or one failed and the others saw it."""
    waiting, starting = dict(children), set(children)
    deadline, grace = time.monotonic() + _START_S, math.inf
    while waiting and (ready := wait(list(waiting), max(0.0, min(deadline, grace) - time.monotonic()))):
        for pipe in waiting.keys() & set(ready):
            child = waiting[pipe]
            if pipe in starting:
                starting.remove(pipe)
                deadline = time.monotonic() + seconds
            try:
                said = pipe.recv()
            except EOFError:
                child.process.join(_GRACE_S)
                said = {"error": f"died with exit code {child.process.exitcode}"}
            if isinstance(said, str):
                child.stage = said
            elif isinstance(said, dict):  # the end
                vars(child).update(said)
                del waiting[pipe]
                grace = min(grace, time.monotonic() + _GRACE_S) if child.error else grace
            else:
                child.values.append(said)


def _call(pipe: Connection, environ: dict[str, str], fn: Callable[..., Iterator[Any]], *args: Any) -> None:
    """What a process does. What libraries print goes nowhere: the terminal is the findings'."""
    end_with_parent()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ.clear()
    os.environ.update(environ)
    try:
        pipe.send("starting")
        for said in fn(*args):
            pipe.send(said)
        pipe.send({"done": True})
    except BaseException as error:
        pipe.send({"error": traceback.format_exception_only(error)[-1].strip()})
    os._exit(0)  # an orderly goodbye would wait for the others, and gloo's threads outlive the group
