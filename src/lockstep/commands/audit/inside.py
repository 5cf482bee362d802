"""Run the user's script in this process, recorded; and the same in what it spawns."""

import ctypes
import importlib
import multiprocessing.process
import multiprocessing.spawn
import os
import random
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from lockstep.commands.audit import events
from lockstep.commands.audit.plan import Plan, current

# modules of this package whose `install(plan)` runs before the script's first line, in this order
PARTS: tuple[str, ...] = (
    "waiting",
    "scratch",
    "small",
    "cuda",
    "recorders.groups",
    "recorders.reading",
    "recorders.passing",
    "recorders.stepping",
    "recorders.reducing",
    "recorders.drawing",
    "recorders.saving",
    "recorders.syncing",
    "recorders.telling",
)
_SEED = 20_000  # of torch, numpy and random, and the rank on top: unseeded processes differ, and every run is alike
_DIE_WITH_PARENT = 1  # of prctl(2)
_CHILD = "from lockstep.commands.audit.inside import child; child(); from multiprocessing.spawn import spawn_main; "


def install(plan: Plan) -> None:
    """Install all parts in this process: in the first one, and in each that it spawns."""
    _number = os.environ.get("RANK", "")
    rank = int(_number) if _number.isdigit() and not plan.spawns else None
    node = int(os.environ.get("GROUP_RANK", "0"))
    events.begin(plan, rank=rank, world=plan.nproc if rank is not None else None, worker=None, node=node)
    seed(rank or 0)
    for name in PARTS:
        importlib.import_module(f"lockstep.commands.audit.{name}").install(plan)
    _record_children()


def seed(rank: int) -> None:
    """Seed what an unseeded script draws from: alike in every run, another one on each rank, as in life."""
    import numpy
    import torch

    torch.manual_seed(_SEED + rank)
    numpy.random.seed(_SEED + rank)
    random.seed(_SEED + rank)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _record_children() -> None:
    """Have the interpreters that multiprocessing starts install the same before they import the script."""
    original = multiprocessing.spawn.get_command_line

    @wraps(original)
    def command_line(**values: Any) -> list[str]:
        line = original(**values)
        place = line.index("-c") + 1
        return [*line[:place], _CHILD + line[place], *line[place + 1 :]]

    multiprocessing.spawn.get_command_line = command_line


def child() -> None:
    """What a spawned interpreter does first."""
    end_with(os.getppid())
    importlib.import_module("torch.multiprocessing.spawn")
    spawning: Any = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of that name
    plan = current()
    original = spawning._wrap

    @wraps(original)
    def recorded(fn: Callable[..., Any], i: int, args: tuple[Any, ...], error_file: str) -> None:
        seed(i)

        @wraps(fn)
        def told(*given: Any) -> None:
            with _told():
                fn(*given)

        original(told, i, args, error_file)

    spawning._wrap = recorded
    run = multiprocessing.process.BaseProcess.run

    @wraps(run)
    def told_run(self: multiprocessing.process.BaseProcess) -> None:
        with _told():
            run(self)

    multiprocessing.process.BaseProcess.run = told_run  # type: ignore[method-assign]
    install(plan)


_ended = False


@contextmanager
def _told() -> Iterator[None]:
    """Record how what runs inside comes to its end, once a process."""
    try:
        yield
    except SystemExit as end:
        _end("exit" if end.code else "done", code=end.code if isinstance(end.code, int | None) else 1)
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        home = current().home.rstrip("/") + "/"
        lines = [
            f"{each.filename.removeprefix(home)}:{each.lineno}" for each in frames if each.filename.startswith(home)
        ]
        _end("error", at=lines[-1] if lines else "", error=f"{type(error).__name__}: {error}"[:2000], trace=lines)
        raise
    _end("done")


def _end(how: str, **values: Any) -> None:
    global _ended
    if not _ended:
        _ended = True
        events.emit("end", how=how, **values)


def run() -> None:
    """Run the script of this process's plan as the main program, and end the process as it would have ended."""
    plan = current()
    install(plan)
    os.chdir(plan.home)
    told = [f"{plan.local_rank}={os.environ['LOCAL_RANK']}"] if plan.local_rank else []
    sys.argv = [plan.script, *told, *plan.arguments]
    sys.path.insert(0, str(Path(plan.script).parent))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=plan.script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    code = compile(Path(plan.script).read_bytes(), plan.script, "exec", dont_inherit=True)
    with _told():
        exec(code, main.__dict__)
