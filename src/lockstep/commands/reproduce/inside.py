"""Run the user's script in this process, recorded: its arguments are the script's; the plan is in the environment.

Leaves rank-N.json and rank-N.safetensors in the plan's folder.
"""

import hashlib
import multiprocessing.spawn
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lockstep.commands.audit.cuda import pretend
from lockstep.commands.reproduce import made
from lockstep.commands.reproduce.loaders import Enough, Loaders
from lockstep.commands.reproduce.recorder import Recorder
from lockstep.commands.reproduce.start import Plan
from lockstep.commands.reproduce.watching import watch
from lockstep.commands.reproduce.written import write, write_json

_CHILD = "from lockstep.commands.reproduce.inside import child; child(); "  # what a spawned interpreter does first
_installed: list[Recorder] = []  # this process's


def install(plan: Plan) -> Recorder:
    """Watch this process from here on, before the script is imported."""
    if plan.cuda:
        pretend(plan.cuda, lambda *_, **__: None)
    if plan.double:
        torch.set_default_dtype(torch.float64)
    home = str(Path(plan.script).parent)
    made.note_calls(home)
    recorder = Recorder(plan.steps, Loaders(plan.steps, time.monotonic() + plan.seconds), home)
    recorder.loaders.install()
    watch(recorder)
    _keep_files(Path(plan.folder) / "saved")
    _follow_spawn()
    _installed[:] = [recorder]
    return recorder


def child() -> None:
    """Watch an interpreter that multiprocessing starts."""
    install(Plan.read())


class Spawned:
    """The function of a spawned process, recorded there; it travels by name, as torch's spawn asks."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, rank: int, *args: Any) -> None:
        """Run it as process `rank`."""
        run_recorded(Plan.read(), _installed[0], lambda: self.fn(rank, *args), rank)


def _follow_spawn() -> None:
    original: Callable[..., Any] = vars(mp)["spawn"]  # a function that shadows its module
    line = multiprocessing.spawn.get_command_line

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **kwargs: Any) -> Any:
        return original(Spawned(fn), args, nprocs, *more, **kwargs)

    def command_line(**values: Any) -> list[str]:
        words = line(**values)
        place = words.index("-c") + 1
        return [*words[:place], _CHILD + words[place], *words[place + 1 :]]

    vars(mp)["spawn"] = spawn
    multiprocessing.spawn.get_command_line = command_line


def _keep_files(folder: Path) -> None:
    """What the script saves goes to a folder of ours, and is loaded from there: these are no weights that it wants."""
    save, load = torch.save, torch.load

    def place(name: Any) -> Path:
        return folder / hashlib.sha256(str(Path(name).absolute()).encode()).hexdigest()

    def kept(thing: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            folder.mkdir(exist_ok=True)
            f = place(f)
        save(thing, f, *args, **kwargs)

    def loaded(f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike) and place(f).exists():
            f = place(f)
        return load(f, *args, **kwargs)

    vars(torch).update(save=kept, load=loaded)


def run_recorded(plan: Plan, recorder: Recorder, run: Callable[[], object], rank: int = -1) -> None:
    """Run something of the script's, and leave what was recorded meanwhile, however it ends."""
    end = "done"
    own = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
    world = {"rank": own, "size": int(os.environ.get("WORLD_SIZE", "1"))}
    leaving = dist.destroy_process_group

    def destroy(*args: Any, **kwargs: Any) -> None:
        world.update(_world())
        leaving(*args, **kwargs)

    dist.destroy_process_group = destroy
    try:
        run()
    except Enough as enough:
        end = str(enough)
    except SystemExit as left:
        end = "done" if not left.code else f"it ended with exit code {left.code}"
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
        raise
    finally:
        world.update(_world())
        if recorder.model is not None:
            write(plan, recorder, world["rank"], world["size"], end)
        else:
            write_json(plan, {"rank": world["rank"], "world": world["size"], "end": end, "steps": []})


def _world() -> dict[str, int]:
    return {"rank": dist.get_rank(), "size": dist.get_world_size()} if dist.is_initialized() else {}


def main() -> None:
    """Run the script that the arguments name, as `python SCRIPT ARGS` would."""
    plan = Plan.read()
    recorder = install(plan)
    sys.argv = [plan.script, *sys.argv[1:]]
    sys.path[0:1] = [str(Path(plan.script).parent)]
    module = types.ModuleType("__main__")  # not runpy's: that forgets the module's names when it ends
    module.__file__ = plan.script
    sys.modules["__main__"] = module
    code = compile(Path(plan.script).read_bytes(), plan.script, "exec")
    run_recorded(plan, recorder, lambda: exec(code, module.__dict__))
