"""fp32, TF32, and autocast to bf16 or fp16: what each needs of the device, set up once."""

import typing
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lockstep.config import Precision
from lockstep.distributed.devices import device_name
from lockstep.errors import UserError, unknown
from lockstep.parallel.fsdp import LOW
from lockstep.rng.intercept import FUNCTIONAL

_REPLACED = {*FUNCTIONAL.values()}
P = ParamSpec("P")
T = TypeVar("T")


def configure(precision: str, device: torch.device) -> None:
    """Set the process's TF32 switches, and refuse what the device can't do.

    TF32 rounds the inputs of float32 products to 10 bits of mantissa. torch leaves it *on* for cuDNN's convolutions, so
    fp32 has to turn it off; the autocast precisions keep their remaining float32 work exact too.

    Raises:
        UserError: an unknown precision, tf32 without an NVIDIA GPU that has it, bf16 on a device without it.
    """
    _require_known(precision)
    if precision == "tf32" and not _has_tf32(device):
        raise UserError(
            f"--precision tf32: {device_name(device)} has no TF32",
            "It needs an NVIDIA GPU of 2020 (Ampere) or later; use --precision fp32, or bf16.",
        )
    if precision == "bf16" and not _has_bf16(device):
        raise UserError(
            f"--precision bf16: {device_name(device)} has no bfloat16 arithmetic",
            "Use --precision fp16 (it scales the loss for you) or fp32.",
        )
    # The newer switches are taken back, wherever a process has set them: convolutions follow them, whatever the older
    # ones say. And those are set: after the newer `fp32_precision = "ieee"` torch raises when anything reads them.
    backends: Any = torch.backends
    for place in (backends, backends.cudnn, backends.mkldnn):
        for each in (place, *(getattr(place, name) for name in ("conv", "rnn", "matmul") if hasattr(place, name))):
            each.fp32_precision = "none"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(precision: str, device: torch.device, cache: bool = True) -> Callable[[], AbstractContextManager[object]]:
    """Makes the context of a forward pass and its loss (backward runs outside it); empty for fp32 and tf32.

    The cache of weights that were cast once is one for all threads, so threads that compute side by side want none.
    """
    _require_known(precision)
    dtype = LOW.get(precision)
    return nullcontext if dtype is None else partial(torch.autocast, device.type, dtype, cache_enabled=cache)


def at_least(dtype: torch.dtype, compute: Callable[P, T]) -> Callable[P, T]:
    """`compute`, making nothing narrower than `dtype`, float32 or float64, where Python has a say."""

    def computed(*args: P.args, **kwargs: P.kwargs) -> T:
        with _AtLeast(dtype):
            return compute(*args, **kwargs)

    return computed


class _AtLeast(TorchFunctionMode):
    """Within, torch's functions take tensors of a narrower type as `dtype`, float32 or float64, and make these where
    they are told to make narrower ones: `x.bfloat16()`, `x.to(torch.half)`, a layer whose weights are low."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.narrower = dtype, {*LOW.values()} | ({torch.float32} - {dtype})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # a function of torch.nn.functional that was imported by name comes by what stands there now
        func = func.__wrapped__ if func in _REPLACED else func
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # attributes: p.grad stays what it is, p.dtype is the one computed in
            found = func(*args, **(kwargs or {}))
            return found if isinstance(found, Tensor) else self._widened(found)
        writes = name == "__setitem__" or name.startswith("__i") or (name[-1:] == "_" != name[-2:-1])
        rest, options = tree_map(self._widened, (args[writes:], kwargs or {}))
        if func in (Tensor.bfloat16, Tensor.half, Tensor.float):
            func, rest, options = Tensor.to, [args[0], self.dtype], {}
        return func(*args[:writes], *rest, **options)

    def _widened(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.dtype in self.narrower else value
        return self.dtype if isinstance(value, torch.dtype) and value in self.narrower else value


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """A gradient scaler for fp16, whose small gradients would vanish; None for the others, which have float32's range.

    It decides to skip a step from the gradients after their reduction, so all ranks decide alike.
    """
    _require_known(precision)
    if precision != "fp16":
        return None
    made = torch.amp.GradScaler(device.type)
    made.scale(torch.zeros((), device=device))  # it makes its state here; a rank may have no shard in its first step
    return made


def _require_known(precision: str) -> None:
    if precision not in (known := typing.get_args(Precision)):
        raise unknown("precision", precision, known)


def _has_tf32(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.accelerator.device_index(device.index):
        return bool(torch.get_device_module(device).is_tf32_supported())


def _has_bf16(device: torch.device) -> bool:
    asked = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if asked is None:  # the CPU
        return True
    with torch.accelerator.device_index(device.index):
        return bool(asked(including_emulation=False))
