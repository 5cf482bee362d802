"""Optimizer steps with rates, gradients and weights; schedulers; clipping and the scaler's unscaling."""

import hashlib
import itertools
import weakref
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.commands.audit.events import emit, silence
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders import naming
from lockstep.commands.audit.recorders.patching import around

_EXAMINED = 8  # steps whose gradients and weights are summed
_optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_schedulers_known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_steps: dict[int, int] = {}
_in_scaler = [False]
_before: dict[int, dict[str, Any]] = {}


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


def _parameters(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    every = itertools.chain(*(group["params"] for group in optimizer.param_groups))
    named = [(naming.name_of(each, place), each) for place, each in enumerate(every)]
    return [(name, each) for name, each in named if isinstance(each, torch.Tensor) and _plain(each)]


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
            values["grads"] = {name: _sums(each) for name, each in gradients}
    _before[number] = values


def _end(optimizer: Optimizer, *_: Any) -> None:
    number = _number(optimizer)
    done = _steps.get(number, 0)
    values = _before.pop(number, {})
    if done < _EXAMINED:
        with silence(), torch.no_grad():
            named = _parameters(optimizer)
            values["weights"] = {name: _sums(each) for name, each in named}
            values["digest"] = _digest([each for _, each in named])
    _steps[number] = done + 1
    emit("step", optimizer=number, number=done, **values)


def _sums(tensor: torch.Tensor) -> list[float]:
    """The sum and the norm of all values, in float64."""
    wide = tensor.detach().to(torch.float64)
    return [float(wide.sum()), float(wide.norm())]


def _digest(tensors: list[torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


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
        emit("scheduler", scheduler=_schedulers_known[scheduler], kind=type(scheduler).__name__, lr=rates)
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
