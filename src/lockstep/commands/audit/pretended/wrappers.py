"""What of torch's lies between a script and its GPU beside tensors and groups: wrappers, files, generators, compile."""

# ruff: noqa: ARG001, ARG005, B010  the signatures are torch's, and type checkers would not have its functions replaced

import functools
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.commands.audit.pretended.state import Pretend
from lockstep.commands.audit.pretended.tensors import TAG, place, put


def install(pretend: Pretend) -> None:
    """Put them in torch's places."""
    _wrappers(pretend)
    _files(pretend)
    _generators(pretend)
    setattr(torch, "compile", _not_compiled)
    setattr(torch.nn.Module, "compile", lambda self, *args, **kwargs: None)


def _not_compiled(model: Any = None, **kwargs: Any) -> Any:
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


class _Summed(torch.autograd.Function):
    """The sum over the ranks of a group, there and back."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _summed(grads[0], ctx.group), None


def _summed(x: Any, group: Any) -> Any:
    x = x.clone()
    distributed_c10d.all_reduce(x, group=group)
    return x


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
        total = _Summed.apply(torch.cat([wide.sum(dims), wide.new_full((1,), x.numel() // x.shape[1])]), group)
        total, count = total[:-1], total[-1].detach()
        shape = [1, -1] + [1] * (x.dim() - 2)
        center = wide - (total / count).view(shape)
        squares = _Summed.apply((center * center).sum(dims), group) / count
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
