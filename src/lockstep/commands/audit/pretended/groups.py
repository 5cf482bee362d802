"""Process groups: NCCL answered by gloo, with NCCL's refusals and means."""

import functools
from typing import Any

import torch.distributed as dist

from lockstep.commands.audit.pretended.state import Pretend
from lockstep.commands.audit.pretended.tensors import CPU, place, tensors_in

_COLLECTIVES = (  # those that this torch has: from 2.14 on, `..._single` are the flat ones' names
    *("all_reduce", "reduce", "broadcast", "scatter", "send", "recv", "isend", "irecv"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "gather", "gather_into_tensor", "gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
)
_AVERAGED = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "reduce")


def install(pretend: Pretend) -> None:
    """NCCL answered by gloo; the script hears "nccl" where it asks."""
    torch_init, torch_new, torch_backend = dist.init_process_group, dist.new_group, dist.get_backend
    said: dict[str, str] = {}

    def gloo(backend: Any) -> str:
        return "gloo" if backend is None or "nccl" in str(backend).lower() else str(backend)

    @functools.wraps(torch_init)
    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        kwargs.pop("pg_options", None)
        if device_id is not None:
            pretend.index(device_id, "init_process_group")
        torch_init(gloo(backend), *args, **kwargs)
        said["backend"] = "nccl" if backend is None or "nccl" in str(backend).lower() else str(backend).lower()
        said["cpu"] = "" if str(backend).lower() == "nccl" else "gloo"  # with it, where none or both were asked for

    @functools.wraps(torch_new)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, *args: Any, **kwargs: Any) -> Any:  # fmt: skip  # noqa: E501
        del pg_options
        kwargs.pop("device_id", None)
        return torch_new(ranks, timeout, None if backend is None else gloo(backend), None, *args, **kwargs)

    @functools.wraps(torch_backend)
    def get_backend(group: Any = None) -> str:
        real = torch_backend(group)
        return said.get("backend", real) if real == "gloo" else real

    @functools.wraps(dist.barrier)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, _torch: Any = dist.barrier) -> Any:
        for each in device_ids or ():
            pretend.index(each, "barrier")
        return _torch(group=group, async_op=async_op)

    for name, function in {"init_process_group": init_process_group, "new_group": new_group, "barrier": barrier,
                           "get_backend": get_backend, "is_nccl_available": lambda: True}.items():  # fmt: skip
        setattr(dist, name, function)
    for name in filter(functools.partial(hasattr, dist), _COLLECTIVES):
        setattr(dist, name, _collective(name, getattr(dist, name), said))


def _collective(name: str, function: Any, said: dict[str, str]) -> Any:
    """NCCL refuses tensors on the CPU, and averages, which gloo doesn't."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((*args, *kwargs.values()))
        if said.get("cpu") == "" and any(place(each) == CPU for each in tensors):
            raise RuntimeError(
                f"No backend type associated with device type cpu ({name} of a tensor that was not moved to the GPU)"
            )
        averaged = _average(name, args, kwargs)
        if averaged is None:
            return function(*args, **kwargs)
        args, kwargs, target, world = averaged
        if kwargs.pop("async_op", False):
            return _Divided(function(*args, async_op=True, **kwargs), target, world)
        function(*args, **kwargs)
        _divide(target, world)
        return None

    return called


def _average(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any, int] | None:
    """The call as a sum, the tensor to divide and by what; None where no mean is asked for."""
    ops = [
        each
        for each in (*args, *kwargs.values())
        if each == dist.ReduceOp.AVG and isinstance(each, dist.ReduceOp.RedOpType)
    ]
    if not ops or name not in _AVERAGED:
        return None
    total = dist.ReduceOp.SUM
    same = [total if each is ops[0] else each for each in args]
    named = {key: total if each is ops[0] else each for key, each in kwargs.items()}
    group: Any = named.get("group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
    target = args[0] if args else next(iter(tensors_in(kwargs.values())))
    return tuple(same), named, target, dist.get_world_size(group)


def _divide(total: Any, world: int) -> None:
    """The mean of a sum; of whole numbers without what is left, as NCCL has it."""
    total.div_(world, rounding_mode=None if total.is_floating_point() else "trunc")


class _Divided:
    """A sum under way, which becomes the mean when it is waited for."""

    def __init__(self, work: Any, target: Any, world: int) -> None:
        self.work, self.target, self.world = work, target, world

    def wait(self, *args: Any) -> Any:
        """Wait, and divide once."""
        done = self.work.wait(*args)
        _divide(self.target, self.world)
        self.world = 1
        return done

    def is_completed(self) -> bool:
        """Whether the sum is there."""
        return bool(self.work.is_completed())
