"""Process groups with NCCL's refusals and means, wrappers, files, generators and compile, for pretended GPUs."""

# ruff: noqa: ARG005, B010  the signatures are torch's

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.commands.audit.pretended.cuda import Pretend
from lockstep.commands.audit.pretended.tensors import CPU, TAG, place, put, tensors_in

_COLLECTIVES = (  # those that this torch has: from 2.14 on, `..._single` are the flat ones' names
    *("all_reduce", "reduce", "broadcast", "scatter", "send", "recv", "isend", "irecv"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "gather", "gather_into_tensor", "gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
)
_AVERAGED = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "reduce")


def install(pretend: Pretend) -> None:
    """Put them in torch's places."""
    _groups(pretend)
    _wrappers(pretend)
    _files(pretend)
    _generators(pretend)
    setattr(torch, "compile", _not_compiled)
    setattr(torch.nn.Module, "compile", lambda self, *args, **kwargs: None)


def _groups(pretend: Pretend) -> None:
    """NCCL answered by gloo; the script hears "nccl" where it asks."""
    torch_init, torch_new, torch_backend = dist.init_process_group, dist.new_group, dist.get_backend
    backends: dict[str, str] = {}

    def gloo(backend: Any) -> str:
        return "gloo" if backend is None or "nccl" in str(backend).lower() else str(backend)

    @functools.wraps(torch_init)
    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        kwargs.pop("pg_options", None)
        if device_id is not None:
            pretend.index(device_id, "init_process_group")
        torch_init(gloo(backend), *args, **kwargs)
        backends["backend"] = "nccl" if backend is None or "nccl" in str(backend).lower() else str(backend).lower()
        backends["cpu"] = "" if str(backend).lower() == "nccl" else "gloo"  # with it, where none or both were asked for

    @functools.wraps(torch_new)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, *args: Any, **kwargs: Any) -> Any:  # fmt: skip  # noqa: E501
        del pg_options
        kwargs.pop("device_id", None)
        return torch_new(ranks, timeout, None if backend is None else gloo(backend), None, *args, **kwargs)

    @functools.wraps(torch_backend)
    def get_backend(group: Any = None) -> str:
        real = torch_backend(group)
        return backends.get("backend", real) if real == "gloo" else real

    @functools.wraps(dist.barrier)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, _torch: Any = dist.barrier) -> Any:
        for each in device_ids or ():
            pretend.index(each, "barrier")
        return _torch(group=group, async_op=async_op)

    for name, function in {"init_process_group": init_process_group, "new_group": new_group, "barrier": barrier,
                           "get_backend": get_backend, "is_nccl_available": lambda: True}.items():  # fmt: skip
        setattr(dist, name, function)
    for name in filter(functools.partial(hasattr, dist), _COLLECTIVES):
        setattr(dist, name, _collective(name, getattr(dist, name), backends))


def _collective(name: str, function: Any, backends: dict[str, str]) -> Any:
    """NCCL refuses tensors on the CPU, and averages, which gloo doesn't."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        tensors = tensors_in(arguments)
        if backends.get("cpu") == "" and any(place(each) == CPU for each in tensors):
            raise RuntimeError(
                f"No backend type associated with device type cpu ({name} of a tensor that was not moved to the GPU)"
            )
        kind = dist.ReduceOp.RedOpType
        if name not in _AVERAGED or dist.ReduceOp.AVG not in [each for each in arguments if isinstance(each, kind)]:
            return function(*args, **kwargs)
        asked = [dist.ReduceOp.SUM if isinstance(each, kind) else each for each in args]
        named = {key: dist.ReduceOp.SUM if isinstance(each, kind) else each for key, each in kwargs.items()}
        group: Any = named.get("group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
        work = function(*asked, **named)
        if work is not None:
            work.wait()
        total: Any = args[0] if args else tensors[0]  # of whole numbers without what is left, as NCCL has it
        total.div_(dist.get_world_size(group), rounding_mode=None if total.is_floating_point() else "trunc")
        return None if work is None else SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)

    return called


def _not_compiled(model: Any = None, **_: Any) -> Any:
    """torch.compile for a GPU: the model as it is, which means the same."""
    return model if model is not None else lambda function: function


def _wrappers(pretend: Pretend) -> None:
    torch_ddp = DistributedDataParallel.__init__

    @functools.wraps(torch_ddp)
    def ddp(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        for each in device_ids or ():
            pretend.index(each, "DistributedDataParallel")
        torch_ddp(self, module, device_ids, *args, **kwargs)
        self.use_side_stream_for_tensor_copies = False

    def data_parallel(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        super(DataParallel, self).__init__()
        self.module, self.dim, self.device_ids, self.output_device = module, dim, [], output_device
        for each in range(pretend.visible) if device_ids is None else device_ids:
            pretend.index(each, "DataParallel")

    setattr(DistributedDataParallel, "__init__", ddp)
    setattr(DataParallel, "__init__", data_parallel)
    setattr(batchnorm, "sync_batch_norm", _SyncBatchNorm)


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group, there and back."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group, total = group, x.clone()
        distributed_c10d.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Sum.forward(ctx, grads[0], ctx.group), None


class _SyncBatchNorm:
    """torch's SyncBatchNorm has kernels for GPUs alone: the same by sums over the ranks."""

    @staticmethod
    def apply(
        x: Any, weight: Any, bias: Any, mean: Any, var: Any, eps: float, momentum: float, group: Any, world: int
    ) -> Any:
        """`x` [b, C, ...] normalised by the group's mean and variance; the running ones move by `momentum`."""
        del world
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x.float()
        total = _Sum.apply(torch.cat([wide.sum(dims), wide.new_full((1,), x.numel() // x.shape[1])]), group)
        total, count = total[:-1], total[-1].detach()
        shape = [1, -1] + [1] * (x.dim() - 2)
        center = wide - (total / count).view(shape)
        squares = _Sum.apply((center * center).sum(dims), group) / count
        if mean is not None:
            with torch.no_grad():
                mean.lerp_((total / count).to(mean.dtype), momentum)
                var.lerp_((squares * (count / (count - 1))).to(var.dtype), momentum)
        out = center * torch.rsqrt(squares + eps).view(shape)
        if weight is not None:
            out = out * weight.view(shape) + bias.view(shape)
        return out.to(x.dtype)


def _files(pretend: Pretend) -> None:
    """Files say which GPU a tensor was on, and loading puts it there again, or where map_location says."""

    def written(torch_reduce: Any) -> Any:
        def reduce_ex(self: Any, protocol: Any) -> Any:
            where = place(self)
            put(self, None)  # what is in __dict__ would be in the file
            try:
                if where is not None and where >= 0:
                    setattr(self.untyped_storage(), TAG, where)
                return torch_reduce(self, protocol)
            finally:
                put(self, where)

        return reduce_ex

    def tagger(storage: Any) -> str | None:
        where = getattr(storage, TAG, None)
        return None if where is None else f"cuda:{where}"

    def put_back(storage: Any, location: str) -> Any:
        where = pretend.index(location, "load") if location.startswith("cuda") else None
        if where is None:
            return None
        setattr(storage, TAG, where)
        return storage

    def storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        del non_blocking
        setattr(self, TAG, pretend.index("cuda" if device is None else device, "load"))
        return self

    torch_set = torch.Tensor.set_

    def set_(self: Any, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        where = place(source) if isinstance(source, torch.Tensor) else getattr(source, TAG, None)
        return put(torch_set(self, *(() if source is None else (source, *args)), **kwargs), where)

    setattr(torch.Tensor, "set_", set_)
    for kind in (torch.Tensor, torch.nn.Parameter):
        setattr(kind, "__reduce_ex__", written(kind.__reduce_ex__))
    setattr(torch.UntypedStorage, "cuda", storage_cuda)
    torch.serialization.register_package(5, tagger, put_back)  # before the CPU's, 10


def _generators(pretend: Pretend) -> None:
    """torch.Generator("cuda"): one of the CPU's that says it is on a GPU."""
    torch_generator = torch.Generator

    class _Kind(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, torch_generator)

        def __call__(cls, device: Any = "cpu") -> Any:
            where = pretend.index(device, "Generator")
            return torch_generator(device if where is None else "cpu")

    setattr(torch, "Generator", _Kind("Generator", (), {}))
