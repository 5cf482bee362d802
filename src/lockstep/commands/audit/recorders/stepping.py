"""Optimizer steps with rates, gradients and weights; schedulers; clipping and the scaler's unscaling."""

import itertools
import math
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.commands.audit.events import emit, silence
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders import naming
from lockstep.commands.audit.recorders.patching import around, given
from lockstep.commands.audit.recorders.sums import digest, sums

_EXAMINED = 8  # steps whose gradients and weights are summed
_optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_schedulers_known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_steps: dict[int, int] = {}
_in_scaler = [False]
_before: dict[int, dict[str, Any]] = {}
_passes: dict[int, int] = {}  # over loaders, when an optimizer made its last step


def install(_plan: Plan) -> None:
    """Record every optimizer's steps, every scheduler's, and clipping."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
    for name in ("LRScheduler", "ReduceLROnPlateau"):
        _schedulers(getattr(lr_scheduler, name))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        around(torch.nn.utils, name, _clip(name))
    around(torch.amp.GradScaler, "unscale_", _unscale)
    around(torch.amp.GradScaler, "step", _scaler_step)
    around(Optimizer, "zero_grad", _zero)


def _number(optimizer: Optimizer) -> int:
    if optimizer not in _optimizers:
        _optimizers[optimizer] = next(_numbers)
    return _optimizers[optimizer]


def _named(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    every = itertools.chain(*(group["params"] for group in optimizer.param_groups))
    named = [(naming.name_of(each, place), each) for place, each in enumerate(every)]
    return [(name, each) for name, each in named if isinstance(each, torch.Tensor)]


def _parameters(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [] if naming.parts else [(name, each) for name, each in _named(optimizer) if _plain(each)]


def _shards(optimizer: Optimizer) -> dict[str, list[float]]:
    """Of this rank's part of each parameter: sum, norm, and over how many ranks the parameter is cut."""
    found = {}
    for name, each in _named(optimizer) if all(naming.parts) else ():
        cut, mine = max(naming.parts), each
        if isinstance(each, DTensor):
            places = zip(each.device_mesh.shape, each.placements, strict=True)
            cut, mine = math.prod(size for size, place in places if place.is_shard()), each.to_local()
        found[name] = [*sums(mine), cut]
    return found


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies whole and dense in this process: no shard of FSDP's, nothing sparse or quantised."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _begin(optimizer: Optimizer, *_: Any) -> None:
    number = _number(optimizer)
    with silence(), torch.no_grad():
        values: dict[str, Any] = {"lr": [float(group["lr"]) for group in optimizer.param_groups]}
        if _steps.get(number, 0) < _EXAMINED:
            gradients = [(name, each.grad) for name, each in _parameters(optimizer) if each.grad is not None]
            gradients = [(name, each) for name, each in gradients if _plain(each)]
            values["grads"] = {name: sums(each) for name, each in gradients}
        if _passes.get(number) != naming.passes_begun[0]:
            _passes[number] = naming.passes_begun[0]
            values["begun"] = digest([each for _, each in _parameters(optimizer)])
            values["state"] = _held(optimizer)
    _before[number] = values


def _end(optimizer: Optimizer, *_: Any) -> None:
    number = _number(optimizer)
    done = _steps.get(number, 0)
    values = _before.pop(number, {})
    if done < _EXAMINED:
        with silence(), torch.no_grad():
            named = _parameters(optimizer)
            values["weights"] = {name: sums(each) for name, each in named}
            values["digest"] = digest([each for _, each in named])
            if naming.parts:
                values["shards"] = _shards(optimizer)
    _steps[number] = done + 1
    emit("step", optimizer=number, number=done, **values)


def _held(optimizer: Optimizer) -> int:
    """How many tensors with more than one value an optimizer keeps from earlier steps: momenta, not counts."""
    kept = (each for state in optimizer.state.values() if isinstance(state, dict) for each in state.values())
    return sum(isinstance(each, torch.Tensor) and each.numel() > 1 and bool(each.any()) for each in kept)


def _schedulers(base: type) -> None:
    """Record the steps of a base class of schedulers; the one that its constructor takes is left out."""
    made = "__init__" if base is lr_scheduler.ReduceLROnPlateau else "_initial_step"

    def initial(original: Any, *args: Any, **kwargs: Any) -> Any:
        with silence():
            return original(*args, **kwargs)

    def step(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(scheduler, *args, **kwargs)
        rates = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        if scheduler not in _schedulers_known:
            _schedulers_known[scheduler] = len(_schedulers_known)
        told: dict[str, Any] = {"kind": type(scheduler).__name__, "lr": rates}
        if base is lr_scheduler.ReduceLROnPlateau:
            told["metric"] = float(given(args, kwargs, 0, "metrics"))
        emit("scheduler", told, scheduler=_schedulers_known[scheduler])
        return done

    around(base, made, initial)
    around(base, "step", step)


def _clip(kind: str) -> Any:
    def clip(original: Any, *args: Any, **kwargs: Any) -> Any:
        emit("clip", kind=kind)
        return original(*args, **kwargs)

    return clip


def _unscale(original: Any, scaler: Any, optimizer: Optimizer) -> Any:
    if not _in_scaler[0]:
        emit("unscale", optimizer=_number(optimizer), enabled=scaler.is_enabled())
    return original(scaler, optimizer)


def _scaler_step(original: Any, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    with silence():
        factor = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
    emit("scaler-step", optimizer=_number(optimizer), enabled=scaler.is_enabled(), factor=factor)
    _in_scaler[0] = True  # it unscales by itself what nobody has unscaled
    try:
        return original(scaler, optimizer, *args, **kwargs)
    finally:
        _in_scaler[0] = False


def _zero(original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    emit("zero", optimizer=_number(optimizer))
    return original(optimizer, *args, **kwargs)
