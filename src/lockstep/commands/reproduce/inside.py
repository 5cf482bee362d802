"""Run the user's script in this process, recorded: its arguments are the script's; the plan is in the environment.

Leaves rank-N.json and rank-N.safetensors in the plan's folder.
"""

import inspect
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.commands.reproduce import made
from lockstep.commands.reproduce.loaders import Enough, Loaders, Watched, described
from lockstep.commands.reproduce.made import Unwritable, Writer
from lockstep.commands.reproduce.recorder import Recorder, draws
from lockstep.commands.reproduce.source import excerpt
from lockstep.commands.reproduce.start import Plan
from lockstep.parallel.batchnorm import batch_norms


def install(plan: Plan) -> Recorder:
    """Watch this process from here on."""
    made.note_calls()
    loaders = Loaders(plan.steps, time.monotonic() + plan.seconds)
    recorder = Recorder(plan.steps, loaders)
    loaders.install()
    recorder.install()
    _follow_spawn()
    return recorder


class Spawned:
    """The function of a spawned process, recorded there; it travels by name, as torch's spawn asks."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, rank: int, *args: Any) -> None:
        """Run it as process `rank`."""
        plan = Plan.read()
        recorder = install(plan)
        os.environ.setdefault("RANK", str(rank))
        run_recorded(plan, recorder, lambda: self.fn(rank, *args))


def _follow_spawn() -> None:
    original: Callable[..., Any] = vars(mp)["spawn"]  # a function that shadows its module

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **kwargs: Any) -> Any:
        return original(Spawned(fn), args, nprocs, *more, **kwargs)

    vars(mp)["spawn"] = spawn


def run_recorded(plan: Plan, recorder: Recorder, run: Callable[[], object]) -> None:
    """Run something of the script's, and leave what was recorded meanwhile, however it ends."""
    end = "done"
    world = {"rank": int(os.environ.get("RANK", "0")), "size": int(os.environ.get("WORLD_SIZE", "1"))}
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
            _write_json(plan, {"rank": world["rank"], "world": world["size"], "end": end, "steps": []})


def _world() -> dict[str, int]:
    return {"rank": dist.get_rank(), "size": dist.get_world_size()} if dist.is_initialized() else {}


def _write_json(plan: Plan, values: dict[str, Any]) -> None:
    path = Path(plan.folder) / f"rank-{values['rank']}.json"
    if values["steps"] or not path.exists():
        path.write_text(json.dumps(values, indent=1), encoding="utf-8")


def write(plan: Plan, recorder: Recorder, rank: int, size: int, end: str) -> None:
    """Write the record of this process."""
    assert recorder.model is not None
    writer = Writer(Path(plan.script).parent)
    tensors: dict[str, Tensor] = {f"initial/{name}": each for name, each in recorder.initial.items()}
    steps = []
    for number, (passes, rates) in enumerate(recorder.taken):
        steps.append({"lr": rates, "passes": [_numbers(each) for each in passes]})
        for at, each in enumerate(passes):
            if each.images is not None and each.labels is not None:
                tensors[f"images/{number}/{at}"] = each.images
                tensors[f"labels/{number}/{at}"] = each.labels
            else:
                recorder.say("the loss is none of torch's cross-entropies")
    if recorder.weight is not None:
        tensors["weight"] = recorder.weight
    values = {
        "rank": rank,
        "world": size,
        "end": end,
        "problems": recorder.problems,
        "wrapper": recorder.wrapper,
        "loss": recorder.loss,
        "log_probabilities": recorder.log_probabilities,
        "classes": recorder.classes,
        "clips": recorder.clips,
        "seed": recorder.seed,
        "autocast": recorder.autocast,
        "draws": draws(recorder),
        "batch_norm": sorted({type(each).__name__ for each in batch_norms(recorder.model)}),
        "loaders": [
            described(seen) | _dataset(seen, writer) for seen in recorder.loaders.watched.values() if seen.passes
        ],
        "model": _model(recorder.model, writer),
        "optimizer": _optimizer(recorder, recorder.model, writer),
        "steps": steps,
    }
    values["source"] = _source(plan, writer)
    tensors |= {f"parts/{name}": each for name, each in writer.tensors.items()}
    shared = {name: each.contiguous().clone() for name, each in tensors.items()}
    save_file(shared, Path(plan.folder) / f"rank-{rank}.safetensors")
    _write_json(plan, values)


def _numbers(each: Any) -> dict[str, Any]:
    return {"ids": each.ids, "loss": each.loss, "backward": each.backward}


def _said(write: Callable[[], Any]) -> dict[str, Any]:
    """What an expression is, or why there is none."""
    try:
        return {"expression": write()}
    except Unwritable as why:
        return {"expression": "", "why": str(why)}
    except Exception as error:  # whatever a constructor of the user's raises when it is called again
        return {"expression": "", "why": f"{type(error).__name__}: {error}"}


def _dataset(seen: Watched, writer: Writer) -> dict[str, Any]:
    dataset = seen.loader.dataset
    found = _said(lambda: writer.write(dataset, paths=True))
    kind = f"{type(dataset).__module__}.{type(dataset).__name__}"
    root = getattr(dataset, "root", None) or "."
    facts: dict[str, Any] = {"kind": kind, "root": str(Path(root).resolve())}
    facts["train"] = getattr(dataset, "train", None)
    facts["tensors"] = [list(each.shape) for each in getattr(dataset, "tensors", ())]
    facts["labelled"] = bool(len(getattr(dataset, "classes", ())) or len(getattr(dataset, "targets", ())))
    return {"dataset": found | facts, "transforms": _transforms(dataset)}


def _transforms(dataset: Any) -> list[dict[str, Any]] | None:
    """The transforms of a data set, one after the other, with their plain attributes; None: there are others."""
    if getattr(dataset, "target_transform", None) is not None:
        return None
    transform = getattr(dataset, "transform", None)
    listed = getattr(transform, "transforms", [transform] if transform is not None else [])
    found = []
    for each in listed:
        if not type(each).__module__.startswith("torchvision.transforms"):
            return None
        plain = {key: value for key, value in vars(each).items() if not key.startswith("_") and key != "training"}
        found.append({"name": type(each).__name__, "values": json.loads(json.dumps(plain, default=str))})
    return found


def _model(model: nn.Module, writer: Writer) -> dict[str, Any]:
    found = _said(lambda: writer.write(model))
    if found["expression"]:
        found |= {f"changes_{key}": value for key, value in _said(lambda: made.changes(model, writer)).items()}
    return found | {"name": type(model).__name__, "module": type(model).__module__}


def _optimizer(recorder: Recorder, model: nn.Module, writer: Writer) -> dict[str, Any]:
    optimizer, at_first = recorder.optimizer, recorder.options
    if optimizer is None:
        return {}
    names = {id(each): name for name, each in model.named_parameters()}
    groups = []
    kind = type(optimizer)
    signature = inspect.signature(kind.__init__).parameters.values()
    usual = {each.name: repr(each.default) for each in signature if each.default is not each.empty}
    for group, options in zip(optimizer.param_groups, at_first, strict=False):
        written = {key: repr(value) for key, value in options.items()}
        groups.append({"params": [names.get(id(each), "") for each in group["params"]], "options": written})
    reference = _said(lambda: writer.reference(kind))
    return {"kind": f"{kind.__module__}.{kind.__name__}", "class": reference, "groups": groups, "usual": usual}


def _source(plan: Plan, writer: Writer) -> dict[str, Any]:
    names = vars(sys.modules["__main__"])
    text, missing = excerpt(Path(plan.script).read_text(encoding="utf-8"), writer.names, names)
    return {"text": text, "missing": missing, "modules": sorted(writer.modules), "local": writer.local}


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
