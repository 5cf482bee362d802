"""Run the user's script in this process, recorded; and the same in what it spawns."""

import ctypes
import importlib.util
import itertools
import multiprocessing.context
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
    "pretended",
    "recorders.ranks",
    "recorders.loaders",
    "recorders.training",
)
_SEED = 20_000  # of torch, numpy and random, and the rank on top: unseeded processes differ, and every run is alike
_DIE_WITH_PARENT = 1  # of prctl(2)
_CHILD = "from lockstep.commands.audit.inside import child; child({})"


def install(plan: Plan, child: int | None = None) -> None:
    """Install all parts in this process: in the first one, and in each that it spawns, by their numbers from 0."""
    _number = os.environ.get("RANK", "")
    rank = int(_number) if _number.isdigit() and not plan.spawns else None
    node = int(os.environ.get("GROUP_RANK", "0"))
    events.begin(plan, rank=rank, world=plan.nproc if rank is not None else None, node=node)
    seed(rank or 0 if child is None else child + 1)
    for name in PARTS:
        importlib.import_module(f"lockstep.commands.audit.{name}").install(plan)
    begin_children_with(_CHILD)


def seed(number: int) -> None:
    """Seed what an unseeded script draws from: alike in every run, another one in each process, as in life."""
    import numpy
    import torch

    torch.manual_seed(_SEED + number)
    numpy.random.seed(_SEED + number)
    random.seed(_SEED + number)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def begin_children_with(code: str) -> None:
    """Have each interpreter that multiprocessing starts run this first, with its number from 0 in the place of {}."""
    original, numbers = multiprocessing.spawn.get_command_line, itertools.count()

    @wraps(original)
    def command_line(**values: Any) -> list[str]:
        line = original(**values)
        place = line.index("-c") + 1
        return [*line[:place], f"{code.format(next(numbers))}; {line[place]}", *line[place + 1 :]]

    multiprocessing.spawn.get_command_line = command_line
    # children of a fork server are forked from an interpreter that records nothing: they are spawned instead
    context = multiprocessing.context
    vars(context)["ForkServerProcess"]._Popen = staticmethod(context.SpawnProcess._Popen)


def child(number: int) -> None:
    """What a spawned interpreter does first."""
    end_with(os.getppid())
    spawning: Any = importlib.import_module("torch.multiprocessing.spawn")
    original = spawning._wrap

    @wraps(original)
    def wrap(fn: Callable[..., Any], i: int, args: tuple[Any, ...], error_file: str) -> None:
        original(_with_its_end(fn), i, args, error_file)  # it keeps an error for itself

    spawning._wrap = wrap
    process = multiprocessing.process.BaseProcess
    process.run = _with_its_end(process.run)  # type: ignore[method-assign]
    install(current(), number)


def _with_its_end(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any) -> None:
        with _recorded_end():
            function(*args)

    return called


_ended = False


@contextmanager
def _recorded_end() -> Iterator[None]:
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


def in_copy(path: str, plan: Plan) -> str:
    """A folder of modules below the user's folder as it is in the copy; environments there are not copied."""
    below = plan.origin.rstrip("/") + "/"
    copied = Path(plan.home, path.removeprefix(below))
    return str(copied) if path.startswith(below) and "site-packages" not in path and copied.is_dir() else path


def run() -> None:
    """Run the script of this process's plan as the main program, and end the process as it would have ended."""
    plan = current()
    install(plan)
    os.chdir(plan.home)
    local_rank = [f"{plan.local_rank}={os.environ['LOCAL_RANK']}"] if plan.local_rank else []
    rank = os.environ.get("RANK", "0")
    sys.argv = [plan.script, *local_rank, *(each.replace("{rank}", rank) for each in plan.arguments)]
    sys.path[:] = [in_copy(each, plan) for each in sys.path]
    sys.path.insert(0, plan.home if plan.module else str(Path(plan.script).parent))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=plan.script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    with _recorded_end():
        if plan.module:  # as `python -m`; a child of multiprocessing finds it by the name in __spec__
            spec: Any = importlib.util.find_spec(plan.module)
            main.__dict__.update(__spec__=spec, __package__=spec.parent, __loader__=spec.loader)
        exec(compile(Path(plan.script).read_bytes(), plan.script, "exec", dont_inherit=True), main.__dict__)
