"""Run the user's script in this process, recorded: its arguments are the script's; the plan is in the environment.

Leaves rank-N.json and rank-N.safetensors in the plan's folder.
"""

import hashlib
import multiprocessing.process
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.commands.audit import standins
from lockstep.commands.audit.events import around
from lockstep.commands.audit.inside import begin_children_with
from lockstep.commands.audit.pretended import pretend
from lockstep.commands.reproduce import expressions
from lockstep.commands.reproduce.loaders import Enough, Loaders
from lockstep.commands.reproduce.notes import write, write_json
from lockstep.commands.reproduce.recorder import Recorder
from lockstep.commands.reproduce.start import Plan
from lockstep.commands.reproduce.watching import watch


def install(plan: Plan) -> Recorder:
    """Watch this process from here on, before the script is imported."""
    if plan.cuda:
        pretend(plan.cuda, lambda *_, **__: None)
    if plan.double:
        torch.set_default_dtype(torch.float64)
    home = str(Path(plan.script).parent)
    expressions.note_calls()
    recorder = Recorder(plan.steps, Loaders(plan.steps, time.monotonic() + plan.seconds), home)
    recorder.loaders.install()
    standins.install(recorder.stand_in)
    watch(recorder)
    _keep_files(Path(plan.folder) / "saved")
    begin_children_with("from lockstep.commands.reproduce.inside import child; child({})")
    return recorder


def child(number: int) -> None:
    """Watch an interpreter that multiprocessing starts, from its beginning to its end."""
    recorder, process = install(Plan.read()), multiprocessing.process.BaseProcess

    def run(original: Callable[..., None], *args: Any) -> None:
        run_recorded(Plan.read(), recorder, lambda: original(*args), number)

    around(process, "run", run)


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


def run_recorded(plan: Plan, recorder: Recorder, run: Callable[[], object], number: int = 0) -> None:
    """Run something of the script's, and leave what was recorded meanwhile, however it ends."""
    end = "done"
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
        rank, world = recorder.place or (int(os.environ.get("RANK", number)), int(os.environ.get("WORLD_SIZE", "1")))
        if recorder.model is not None:
            write(plan, recorder, rank, world, end)
        else:
            write_json(plan, {"rank": rank, "world": world, "end": end, "steps": []})


def main() -> None:
    """Run the script that the arguments name, as `python SCRIPT ARGS` would."""
    plan = Plan.read()
    recorder = install(plan)
    sys.argv = [plan.script, *sys.argv[1:]]
    sys.path[0:1] = [str(Path(plan.script).parent)]
    module = types.ModuleType("__main__")  # not runpy's: that forgets the module's names when it ends
    module.__file__ = plan.script
    sys.modules["__main__"] = module
    source = Path(plan.script).read_bytes()
    run_recorded(plan, recorder, lambda: exec(compile(source, plan.script, "exec"), vars(module)))
