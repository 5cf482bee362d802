"""Forward and backward passes, wrappers, the optimizer's steps with weights and rates, schedulers, clipping, draws."""

import hashlib
import itertools
import random
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lockstep.commands.audit.events import argument, around, emit, silence
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders.loaders import passes_begun
from lockstep.commands.audit.recorders.ranks import loss_computed

_WATCHED = 4  # passes through a model and batches read whose draws are recorded, in each process
_EXAMINED = 8  # steps whose gradients and weights are summed
_WRAPPERS = DistributedDataParallel, DataParallel, FullyShardedDataParallel
_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
_names: dict[int, str] = {}  # by id of the parameter, without the wrappers' prefixes
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_sharded_models = [False]  # whether FSDP has any
_modal: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_with_parameters: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_left = {"data": _WATCHED, "forward": _WATCHED}
_deep = threading.local()
_losses: list[float] = []  # that loss functions gave since the last backward pass
_scale = [1.0]  # a gradient scaler's factor on the next one
_optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_schedulers_known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_steps: dict[int, int] = {}
_in_scaler = [False]
_before: dict[int, dict[str, Any]] = {}
_passes: dict[int, int] = {}  # over loaders, when an optimizer took its last step


def install(_plan: Plan) -> None:
    """Record outermost modules' calls, backward passes, optimizers' and schedulers' steps, clipping and draws."""
    around(nn.Module, "__call__", _forward)
    around(_MapDatasetFetcher, "fetch", lambda fetch, *args: watched("data", lambda: fetch(*args)))
    around(torch.Tensor, "backward", _backward)
    around(torch.amp.GradScaler, "scale", _scaled)
    for name in ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy"):
        around(torch.nn.functional, name, _loss)
    around(DistributedDataParallel, "__init__", _wrapped)
    around(FullyShardedDataParallel, "__init__", _sharded)
    for module in (fsdp, fsdp._fully_shard):
        around(module, "fully_shard", _sharded)
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
    for name in ("LRScheduler", "ReduceLROnPlateau"):
        _schedulers(getattr(lr_scheduler, name))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        around(torch.nn.utils, name, _clip)
    around(torch.amp.GradScaler, "unscale_", _unscale)
    around(torch.amp.GradScaler, "step", _scaler_step)
    around(Optimizer, "zero_grad", _zero)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model in DDP, DataParallel or FSDP, and in what Fabric and torch.compile put around those."""
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def wrapper_of(module: nn.Module) -> str:
    """The class of the wrapper that a module is or has around the model; "" for none."""
    while (inner := _inside(module)) is not None:
        if isinstance(module, _WRAPPERS):
            return type(module).__name__
        module = inner
    return ""


def _inside(module: nn.Module) -> nn.Module | None:
    if isinstance(module, _WRAPPERS):
        return module.module
    inner = next((child for name, child in module.named_children() if name in ("_forward_module", "_orig_mod")), None)
    return inner if inner is not None and inner is not module else None


def has_parameters(module: nn.Module) -> bool:
    """Whether a module holds weights: losses and transforms don't."""
    found = _with_parameters.get(module)
    if not found:
        found = _with_parameters[module] = next(module.parameters(), None) is not None
    return found


def changes_with_mode(module: nn.Module) -> bool:
    """Whether training and evaluation mode differ: by dropout, or by batch norm."""
    if module not in _modal:
        _modal[module] = any(
            isinstance(each, nn.modules.batchnorm._BatchNorm) or (isinstance(each, _DROPOUTS) and each.p > 0)
            for each in module.modules()
        )
    return _modal[module]


def remember_names(module: nn.Module) -> None:
    """Remember the names of a model's parameters."""
    model = unwrapped(module)
    if model in _models:
        return
    _models.add(model)
    for name, parameter in model.named_parameters():
        _names.setdefault(id(parameter), name)


def name_of(parameter: torch.Tensor, place: int) -> str:
    """A parameter's name in its model, or its place in the optimizer."""
    return _names.get(id(parameter), f"parameter {place}")


def sums(tensor: torch.Tensor) -> list[float]:
    """The sum and the norm of all values, in float64."""
    wide = tensor.detach().to(torch.float64)
    return [float(wide.sum()), float(wide.norm())]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of all their bytes."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def states(device: bool) -> dict[str, str]:
    """Digests of the generators' states; with the current GPU's where one is wanted."""
    numpy_state: Any = numpy.random.get_state()
    gpu = {"cuda": _digest(torch.cuda.get_rng_state().numpy().tobytes())} if device else {}
    return gpu | {
        "torch": _digest(torch.random.get_rng_state().numpy().tobytes()),
        "numpy": _digest(numpy_state[1].tobytes() + str(numpy_state[2:]).encode()),
        "random": _digest(repr(random.getstate()).encode()),
    }


def _digest(state: bytes) -> str:
    return hashlib.sha256(state).hexdigest()[:12]


def watched(what: str, run: Any) -> Any:
    """`run()`, and in the first of its kind an event `draw` with the states before, and which of them moved."""
    if _left[what] <= 0:
        return run()
    _left[what] -= 1
    gpu = what == "forward" and torch.cuda.is_available()  # loader workers may not touch one
    with silence():
        before = states(gpu)
    try:
        return run()
    finally:
        with silence():
            moved = [name for name, state in states(gpu).items() if state != before[name]]
        emit("draw", what=what, states=before, drew=moved)


def _forward(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if getattr(_deep, "inside", False) or not has_parameters(module):
        return original(module, *args, **kwargs)
    _deep.inside = True
    try:
        with silence():
            remember_names(module)
            values: dict[str, Any] = {
                "training": module.training,
                "grad": torch.is_grad_enabled(),
                "wrapped": wrapper_of(module),
                "size": _size(args),
                "modal": changes_with_mode(module),
            }
        emit("forward", **values)
        if module.training and torch.is_grad_enabled():
            return watched("forward", lambda: original(module, *args, **kwargs))
        return original(module, *args, **kwargs)
    finally:
        _deep.inside = False


def _size(args: tuple[Any, ...]) -> int | None:
    return next((int(each.shape[0]) for each in args if isinstance(each, torch.Tensor) and each.dim()), None)


def _backward(original: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if getattr(_deep, "backward", False):  # under a mode of torch's it calls itself
        return original(loss, *args, **kwargs)
    with silence():
        scale = float(loss.detach()) / _scale[0] if loss.numel() == 1 else None
        last = _losses.pop() if _losses else None
        _losses.clear()
    emit("backward", scale=scale, loss=last)
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
        loss_computed(found, args, kwargs)
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
        norms = _batch_norms(module)
    emit("wrap", kind="ddp", batch_norms=norms)
    original(wrapper, module, *args, **kwargs)


def _sharded(original: Any, *args: Any, **kwargs: Any) -> Any:
    """FullyShardedDataParallel's __init__, or fully_shard: from here on no rank has whole weights to compare."""
    emit("wrap", kind="fsdp")
    _sharded_models[0] = True
    return original(*args, **kwargs)


def _batch_norms(*modules: nn.Module) -> int:
    """How many layers take the statistics of their own rank alone."""
    layers = [layer for module in modules for layer in module.modules()]
    plain = [each for each in layers if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    return sum(not isinstance(each, nn.SyncBatchNorm) for each in plain)


def _number(optimizer: Optimizer) -> int:
    if optimizer not in _optimizers:
        _optimizers[optimizer] = next(_numbers)
    return _optimizers[optimizer]


def _named(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    every = itertools.chain(*(group["params"] for group in optimizer.param_groups))
    named = [(name_of(each, place), each) for place, each in enumerate(every)]
    return [(name, each) for name, each in named if isinstance(each, torch.Tensor)]


def _parameters(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [] if _sharded_models[0] else [(name, each) for name, each in _named(optimizer) if _plain(each)]


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
        if _passes.get(number) != passes_begun[0]:
            _passes[number] = passes_begun[0]
            named = _parameters(optimizer)
            values["begun"] = digest(each for _, each in named) if named else ""
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
    _steps[number] = done + 1
    emit("step", optimizer=number, number=done, **values)


def _held(optimizer: Optimizer) -> int:
    """How many tensors with more than one value an optimizer keeps from earlier steps: momenta, not counts."""
    kept = (each for state in optimizer.state.values() if isinstance(state, dict) for each in state.values())
    return sum(isinstance(each, torch.Tensor) and each.numel() > 1 and bool(each.any()) for each in kept)


def _schedulers(base: type) -> None:
    """Record the steps of a base class of schedulers; the one that its constructor takes is left out."""
    first = "__init__" if base is lr_scheduler.ReduceLROnPlateau else "_initial_step"

    def initial(original: Any, *args: Any, **kwargs: Any) -> Any:
        with silence():
            return original(*args, **kwargs)

    def step(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(scheduler, *args, **kwargs)
        rates = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        if scheduler not in _schedulers_known:
            _schedulers_known[scheduler] = len(_schedulers_known)
        values: dict[str, Any] = {"scheduler": _schedulers_known[scheduler], "lr": rates}
        if base is lr_scheduler.ReduceLROnPlateau:
            values["metric"] = float(argument(args, kwargs, 0, "metrics"))
        emit("scheduler", **values)
        return done

    around(base, first, initial)
    around(base, "step", step)


def _clip(original: Any, *args: Any, **kwargs: Any) -> Any:
    emit("clip")
    return original(*args, **kwargs)


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
