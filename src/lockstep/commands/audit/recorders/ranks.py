"""What a process exchanges and leaves: groups, collectives, checkpoints, lines of output, losses."""

import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d

from lockstep.commands.audit.events import argument, around, emit, silence, user_line
from lockstep.commands.audit.plan import Plan

# DDP's own all-reduce happens inside torch and is not among them
OPERATIONS = (
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("gather", "gather_into_tensor", "gather_object", "gather_single", "scatter", "scatter_object_list"),
    *("all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "barrier", "monitored_barrier"),
)
_FEW = 4  # values of a tensor that are recorded: sums and counts, no gradients
_MOST, _LONG = 400, 300  # lines of output that are recorded of a process, and characters of a line
_NUMBER = re.compile(r"\d\.\d")
_numbers = itertools.count()
_inside = [False]
_left = [_MOST]


def install(plan: Plan) -> None:
    """Record them, and lead every TCP rendezvous to the plan's port."""
    _groups(plan)
    for name in OPERATIONS:
        for module in (distributed_c10d, dist):
            if hasattr(module, name):
                around(module, name, _collective(name))
    _files(plan)
    for stream in (sys.stdout, sys.stderr):
        _listen(stream)


def _groups(plan: Plan) -> None:
    def store(_: Any, *args: Any, **kwargs: Any) -> TCPStore:
        timeout = argument(args, kwargs, 4, "timeout", distributed_c10d.default_pg_timeout)
        return TCPStore("127.0.0.1", plan.port, None, False, timeout)

    def begin(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        emit("group", rank=dist.get_rank(), world=dist.get_world_size())

    rendezvous = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    around(rendezvous, "_create_c10d_store", store)
    for module in (distributed_c10d, dist):
        around(module, "init_process_group", begin)


def _collective(op: str) -> Any:
    """Record a collective before it is called; those that it calls itself are left out."""

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside[0]:
            return original(*args, **kwargs)
        _inside[0] = True
        try:
            with silence():
                arguments = [*args, *kwargs.values()]
                tensor = next((each for each in arguments if isinstance(each, torch.Tensor)), None)
                group = next((each for each in arguments if isinstance(each, dist.ProcessGroup)), None)
                size = dist.get_world_size(group) if dist.is_initialized() else None
                shape = None if tensor is None else list(tensor.shape)
                values = _values(tensor)
            emit("collective", op=op, number=next(_numbers), shape=shape, group=size, values=values)
            return original(*args, **kwargs)
        finally:
            _inside[0] = False

    return call


def _values(tensor: torch.Tensor | None) -> list[float] | None:
    if tensor is None or not 0 < tensor.numel() <= _FEW or tensor.is_complex():
        return None
    return [float(each) for each in tensor.detach().double().reshape(-1).tolist()]


def _files(plan: Plan) -> None:
    def save(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        emit("saved", path=_path(plan, argument(args, kwargs, 1, "f")))

    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        emit("loaded", path=_path(plan, argument(args, kwargs, 0, "f")))
        return original(*args, **kwargs)

    around(torch, "save", save)
    around(torch, "load", load)


def _path(plan: Plan, target: Any) -> str:
    """The file relative to the working copy where it lies in it; "" for what is no file."""
    if not isinstance(target, str | os.PathLike):
        return ""
    path = Path(target).absolute()
    return str(path.relative_to(plan.home)) if path.is_relative_to(plan.home) else str(path)


def _listen(stream: Any) -> None:
    """Record the lines with a number that print, loggers and bars write to a stream."""
    write, begun = stream.write, [""]

    def heard(text: str) -> Any:
        *lines, begun[0] = (begun[0] + text).split("\n")
        begun[0] = begun[0][-_LONG:]
        for line in lines:
            if _left[0] > 0 and _NUMBER.search(line) and user_line():
                _left[0] -= 1
                emit("printed", text=line[:_LONG])
        return write(text)

    stream.write = heard


def loss_computed(found: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a loss as the mean over its samples, and how many these are."""
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    if not isinstance(target, torch.Tensor) or not target.dim():
        return
    with silence():
        size, value = int(target.shape[0]), float(found.detach().double().mean())
    if size and kwargs.get("reduction") == "sum":
        value /= size
    emit("loss", value=value, size=size)
