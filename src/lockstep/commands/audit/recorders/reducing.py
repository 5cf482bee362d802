"""What the ranks say to each other by torch.distributed's functions. DDP's own all-reduce is not among them."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep.commands.audit.events import emit, silence
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders.patching import around

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
_FEW = 4  # values of a tensor that are told
_numbers = itertools.count()
_inside = [False]


def install(_plan: Plan) -> None:
    """Record each collective before it is called; those that it is made of itself are left out."""
    for name in OPERATIONS:
        for module in (distributed_c10d, dist):
            if hasattr(module, name):
                around(module, name, _recorded(name))


def _recorded(op: str) -> Any:
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside[0]:
            return original(*args, **kwargs)
        _inside[0] = True
        try:
            with silence():
                told = _told(args, kwargs)
            number = next(_numbers)
            emit("collective", told, op=op, number=number)
            done = original(*args, **kwargs)
            if told["values"] is not None and done is None:  # a Work object is not done yet
                with silence():
                    values = _values(_tensor(args, kwargs))
                emit("reduced", number=number, values=values)
            return done
        finally:
            _inside[0] = False

    return call


def _told(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = [*args, *kwargs.values()]
    tensor = _tensor(args, kwargs)
    reduce = next((each for each in given if isinstance(each, dist.ReduceOp | dist.ReduceOp.RedOpType)), None)
    group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None)
    return {
        "shape": None if tensor is None else list(tensor.shape),
        "dtype": None if tensor is None else str(tensor.dtype).removeprefix("torch."),
        "reduce": None if reduce is None else str(reduce).rpartition(".")[2],
        "group": dist.get_world_size(group) if dist.is_initialized() else None,
        "values": _values(tensor),
    }


def _tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)


def _values(tensor: torch.Tensor | None) -> list[float] | None:
    """What a small tensor holds: sums and counts, no gradients."""
    if tensor is None or not 0 < tensor.numel() <= _FEW or tensor.is_complex():
        return None
    return [float(each) for each in tensor.detach().double().reshape(-1).tolist()]
