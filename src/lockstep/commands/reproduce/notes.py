"""A recorder's notes as files: JSON for facts, safetensors for tensors. No pickle."""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lockstep.commands.reproduce import expressions
from lockstep.commands.reproduce.expressions import Unwritable, Writer
from lockstep.commands.reproduce.loaders import Watched, described
from lockstep.commands.reproduce.recorder import Recorder
from lockstep.commands.reproduce.source import excerpt
from lockstep.commands.reproduce.start import Plan
from lockstep.parallel.batchnorm import batch_norms

_NOTED = (
    *("problems", "loss", "log_probabilities", "classes", "clips", "clip_scale", "seed", "autocast"),
    *("compiled", "channels_last", "skipped", "by_hand", "changed", "reduces", "stand_ins"),
)


def write_json(plan: Plan, values: dict[str, Any]) -> None:
    """Write a rank's record, over none that has steps."""
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
        numbers = [{name: getattr(each, name) for name in ("ids", "loss", "backward", "at")} for each in passes]
        steps.append({"lr": rates, "passes": numbers})
        for at, each in enumerate(passes):
            if each.images is not None and each.labels is not None:
                tensors[f"images/{number}/{at}"] = each.images
                tensors[f"labels/{number}/{at}"] = each.labels
            elif not recorder.problems:
                recorder.say("the loss is none of torch's cross-entropies")
    if recorder.weight is not None:
        tensors["weight"] = recorder.weight
    values = {name: getattr(recorder, name) for name in _NOTED} | {
        "rank": rank,
        "world": size,
        "end": end,
        "evaluated": sorted(recorder.evaluated),
        "cuda": plan.cuda,
        "draws": recorder.draws is not None and recorder.draws.plan is not None,  # whether the model does in forward
        "batch_norm": sorted({type(each).__name__ for each in batch_norms(recorder.model)}),
        "loaders": [
            described(seen) | _dataset(seen, writer) for seen in recorder.loaders.watched.values() if seen.passes
        ],
        "model": _model(recorder.model, writer),
        "scheduler": _scheduler(recorder, writer),
        "optimizer": _optimizer(recorder, recorder.model, writer),
        "steps": steps,
    }
    values["source"] = _source(plan, writer)
    tensors |= {f"parts/{name}": each for name, each in writer.tensors.items()}
    shared = {name: each.contiguous().clone() for name, each in tensors.items()}
    save_file(shared, Path(plan.folder) / f"rank-{rank}.safetensors")
    write_json(plan, values)


def _expression(write: Callable[[], Any]) -> dict[str, Any]:
    """What an expression is, or why there is none."""
    try:
        return {"expression": write()}
    except Unwritable as why:
        return {"expression": "", "why": str(why)}
    except Exception as error:  # whatever a constructor of the user's raises when it is called again
        return {"expression": "", "why": f"{type(error).__name__}: {error}"}


def _dataset(seen: Watched, writer: Writer) -> dict[str, Any]:
    dataset = seen.loader.dataset
    writer.folders.add(str(getattr(dataset, "root", "")))  # also one that is not there yet
    found = _expression(lambda: writer.write(dataset, paths=True))
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
    found = _expression(lambda: writer.write(model))
    if found["expression"]:
        found |= {
            f"changes_{key}": value for key, value in _expression(lambda: expressions.changes(model, writer)).items()
        }
    return found | {"name": type(model).__name__}


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
    reference = _expression(lambda: writer.reference(kind))
    return {"kind": f"{kind.__module__}.{kind.__name__}", "class": reference, "groups": groups, "usual": usual}


def _scheduler(recorder: Recorder, writer: Writer) -> dict[str, Any]:
    """The scheduler as an expression of `optimizer`, and whether it is stepped with each of the optimizer's steps."""
    found, counts = expressions.schedulers(recorder.optimizer)[-1:], recorder.counts
    if not found:
        return {}
    writer.known[id(recorder.optimizer)] = "optimizer"
    facts: dict[str, Any] = {"name": type(found[0]).__name__, "each_step": len(counts) > 1 and counts[-1] != counts[0]}
    facts["momentum"] = bool(getattr(found[0], "cycle_momentum", False))
    entry = _expression(lambda: writer.write(found[0]))
    if not entry["expression"]:
        entry["table"] = _expression(lambda: _table(recorder, found[0], writer))["expression"]
    return facts | entry


def _table(recorder: Recorder, scheduler: Any, writer: Writer) -> str:
    """The first group's rates of all steps of the run, where the scheduler is a function of the step."""
    functions = getattr(scheduler, "lr_lambdas", [])
    if type(scheduler) is not LambdaLR or len(functions) != 1:
        raise Unwritable(f"a {type(scheduler).__name__}")
    trained = recorder.loaders.trains()[0]
    steps = -(-len(trained.loader) // max(1, len(recorder.taken[0][0]))) * trained.passes
    rates = [scheduler.base_lrs[0] * functions[0](step) for step in range(steps + 1)]
    return f"{writer.write(torch.tensor(rates, dtype=torch.float64))}.tolist()"


def _source(plan: Plan, writer: Writer) -> dict[str, Any]:
    names = vars(sys.modules["__main__"])
    text, missing = excerpt(Path(plan.script).read_text(encoding="utf-8"), writer.names, names)
    return {"text": text, "missing": missing, "modules": sorted(writer.modules), "local": writer.local}
