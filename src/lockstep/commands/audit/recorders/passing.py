"""Forward and backward passes, training and evaluation mode, and what a model is wrapped by."""

import threading
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.commands.audit.events import emit, silence
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders import naming
from lockstep.commands.audit.recorders.drawing import watched
from lockstep.commands.audit.recorders.patching import around
from lockstep.commands.audit.recorders.sums import digest
from lockstep.commands.audit.recorders.telling import tell_loss, tell_pixels

_deep = threading.local()
_losses: list[float] = []  # that loss functions gave since the last backward pass
_scale = [1.0]  # a gradient scaler's factor on the next one


def install(_plan: Plan) -> None:
    """Record the outermost modules' calls, each backward pass and each change of mode."""
    around(nn.Module, "__call__", _forward)
    around(nn.Module, "train", _mode)
    around(torch.Tensor, "backward", _backward)
    around(torch.amp.GradScaler, "scale", _scaled)
    for name in ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy"):
        around(torch.nn.functional, name, _loss)
    around(DistributedDataParallel, "__init__", _wrapped)
    around(FullyShardedDataParallel, "__init__", _sharded)
    for module in (fsdp, fsdp._fully_shard):
        around(module, "fully_shard", _sharded)
    around(nn.SyncBatchNorm, "convert_sync_batchnorm", _converted)


def _forward(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if type(module).__name__ == "Normalize":
        tell_pixels(module, args)
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
                "wrapped": naming.wrapper_of(module),
                "size": _size(args),
                "sync": naming.synchronises(),
                "modal": naming.changes_with_mode(module),
                "devices": naming.devices(module),
            }
        emit("forward", told)
        if module.training and torch.is_grad_enabled():
            return watched("forward", lambda: original(module, *args, **kwargs))
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
    if getattr(_deep, "backward", False):  # under a mode of torch's it calls itself
        return original(loss, *args, **kwargs)
    with silence():
        scale = float(loss.detach()) / _scale[0] if loss.numel() == 1 else None
        last = _losses.pop() if _losses else None
        _losses.clear()
    emit("backward", scale=scale, loss=last, sync=naming.synchronises())
    _deep.backward = True
    try:
        return original(loss, *args, **kwargs)
    finally:
        _deep.backward = False


def _loss(original: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(_deep, "loss", False):
        return original(*args, **kwargs)
    _deep.loss = True
    try:
        found = original(*args, **kwargs)
        if found.numel() == 1 and found.requires_grad:
            with silence():
                _losses.append(float(found.detach()))
        tell_loss(found, args, kwargs)
        return found
    finally:
        _deep.loss = False


def _scaled(original: Any, scaler: Any, outputs: Any) -> Any:
    found = original(scaler, outputs)
    with silence():
        _scale[0] = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
    return found


def _wrapped(original: Any, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    with silence():
        told = {
            "find_unused": bool(kwargs.get("find_unused_parameters", False)),
            "devices": naming.devices(module),
            **_norms(module),
        }
    emit("wrap", told, kind="ddp")
    original(wrapper, module, *args, **kwargs)
    naming.wrappers.add(wrapper)


def _sharded(original: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
    """FullyShardedDataParallel's __init__, or fully_shard, which returns a module."""
    wraps = isinstance(first, FullyShardedDataParallel)
    with silence():
        given = kwargs.get("module", args[0] if args else None) if wraps else first
        modules: list[Any] = given if isinstance(given, list) else [given]
        told = {"find_unused": False, "devices": [], "begun": _begun(modules), **_norms(*modules)}
        if kwargs.get("sync_module_states"):
            told["begun"] = ""
    emit("wrap", told, kind="fsdp")
    naming.parts.append(1)
    made = original(first, *args, **kwargs)
    if wraps and first.sharding_strategy is not ShardingStrategy.NO_SHARD:
        ignores = kwargs.get("ignored_modules") or kwargs.get("ignored_states")  # which nobody tells from shards
        naming.parts[-1] = 0 if ignores else first.process_group.size()
    return made


def _begun(modules: list[nn.Module]) -> str:
    """A digest of the weights that are about to be cut; "" where there are none yet."""
    every = [each for module in modules for each in module.parameters()]
    return "" if any(each.is_meta or isinstance(each, DTensor) for each in every) else digest(every)


def _converted(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with silence():
        told = {"wrapped": naming.is_wrapped(module), **_norms(module)}
    emit("wrap", told, kind="syncbn")
    return original(module, *args, **kwargs)


def _norms(*modules: nn.Module) -> dict[str, int]:
    layers = [layer for module in modules for layer in module.modules()]
    plain = [each for each in layers if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    synced = [each for each in plain if isinstance(each, nn.SyncBatchNorm)]
    return {"batch_norms": len(plain) - len(synced), "sync_batch_norms": len(synced)}
