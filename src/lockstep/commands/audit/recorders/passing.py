"""Forward and backward passes, training and evaluation mode, and what a model is wrapped by."""

import threading
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.commands.audit.events import emit, silence
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders import naming
from lockstep.commands.audit.recorders.patching import around

_deep = threading.local()


def install(_plan: Plan) -> None:
    """Record the outermost modules' calls, each backward pass and each change of mode."""
    around(nn.Module, "__call__", _forward)
    around(nn.Module, "train", _mode)
    around(torch.Tensor, "backward", _backward)
    around(DistributedDataParallel, "__init__", _wrapped)
    around(nn.SyncBatchNorm, "convert_sync_batchnorm", _converted)


def _forward(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if getattr(_deep, "inside", False) or not naming.has_parameters(module):
        return original(module, *args, **kwargs)
    _deep.inside = True
    try:
        with silence():
            naming.learn(module)
            told = {
                "model": type(naming.bare(module)).__name__,
                "training": module.training,
                "grad": torch.is_grad_enabled(),
                "wrapped": type(module).__name__ if naming.bare(module) is not module else "",
                "size": _size(args),
            }
        emit("forward", told)
        return original(module, *args, **kwargs)
    finally:
        _deep.inside = False


def _size(args: tuple[Any, ...]) -> int | None:
    return next((int(each.shape[0]) for each in args if isinstance(each, torch.Tensor) and each.dim()), None)


def _mode(original: Any, module: nn.Module, mode: bool = True) -> Any:
    if getattr(_deep, "mode", False):
        return original(module, mode)
    _deep.mode = True
    try:
        if naming.has_parameters(module):
            emit("mode", model=type(naming.bare(module)).__name__, training=bool(mode))
        return original(module, mode)
    finally:
        _deep.mode = False


def _backward(original: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    with silence():
        scale = float(loss.detach()) if loss.numel() == 1 else None
    emit("backward", scale=scale, sync=naming.synchronises())
    return original(loss, *args, **kwargs)


def _wrapped(original: Any, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    with silence():
        told = {
            "find_unused": bool(kwargs.get("find_unused_parameters", False)),
            "devices": sorted({str(each.device) for each in module.parameters()}),
            **_norms(module),
        }
    emit("wrap", told, kind="ddp")
    original(wrapper, module, *args, **kwargs)
    naming.wrappers.add(wrapper)


def _converted(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with silence():
        told = {"wrapped": naming.bare(module) is not module, **_norms(module)}
    emit("wrap", told, kind="syncbn")
    return original(module, *args, **kwargs)


def _norms(module: nn.Module) -> dict[str, int]:
    layers = list(module.modules())
    plain = [each for each in layers if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    synced = [each for each in plain if isinstance(each, nn.SyncBatchNorm)]
    return {"batch_norms": len(plain) - len(synced), "sync_batch_norms": len(synced)}
