"""Checkpoints: which rank saves what where, and how it is loaded."""

import os
from pathlib import Path
from typing import Any

import torch

from lockstep.commands.audit.events import emit
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders.patching import around, given

_KEYS = 12  # of a checkpoint that are told


def install(plan: Plan) -> None:
    """Record torch.save and torch.load."""

    def save(original: Any, *args: Any, **kwargs: Any) -> Any:
        held, target = given(args, kwargs, 0, "obj"), given(args, kwargs, 1, "f")
        done = original(*args, **kwargs)
        emit("saved", path=_path(plan, target), **_kinds(held))
        return done

    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        target, place = given(args, kwargs, 0, "f"), given(args, kwargs, 1, "map_location")
        only = kwargs.get("weights_only")
        emit("loaded", path=_path(plan, target), map_location=None if place is None else str(place), weights_only=only)
        return original(*args, **kwargs)

    around(torch, "save", save)
    around(torch, "load", load)


def _path(plan: Plan, target: Any) -> str:
    """The file relative to the working copy where it lies in it; "" for what is no file."""
    if not isinstance(target, str | os.PathLike):
        return ""
    path = Path(target).absolute()
    return str(path.relative_to(plan.home)) if path.is_relative_to(plan.home) else str(path)


def _kinds(held: Any) -> dict[str, Any]:
    """The names in a checkpoint, and whether names of weights begin with the wrapper's prefix."""
    if not isinstance(held, dict):
        return {"keys": [], "module": False, "kind": type(held).__name__}
    names = [str(name) for name in held]
    inner = [str(name) for part in held.values() if isinstance(part, dict) for name in part]
    tensors = any(isinstance(part, torch.Tensor) for part in held.values())
    weights = names if tensors else inner
    return {
        "keys": [] if tensors else names[:_KEYS],
        "module": any(name.startswith("module.") for name in weights),
        "kind": "weights" if tensors else "dict",
    }
