"""A verified checkpoint back into the live objects, and the differences that forbid it."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.format import EMA, MODEL, OPTIMIZER, Damaged, decode, read_tensors
from lockstep.checkpoint.snapshot import describe_parameters, numbered
from lockstep.checkpoint.verified import Loaded
from lockstep.checkpoint.weights import copy_into, state_tensors
from lockstep.errors import UserError
from lockstep.parallel.local import OF_RANKS, OUTER
from lockstep.parallel.sharded import is_part, part_of

_SHOWN = 12  # lines of a difference that an error lists
_ADAM, _ADADELTA = ("step", "exp_avg", "exp_avg_sq"), ("step", "square_avg", "acc_delta")
_KEPT = {"SGD": ("momentum_buffer",), "Adam": _ADAM, "AdamW": _ADAM, "Adadelta": _ADADELTA}  # for each parameter
_KERNELS = ("foreach", "fused", "capturable")  # how an optimizer computes: the live one's, it may be on another device


def restore(
    loaded: Loaded,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    ema: nn.Module | None = None,
    keep: Collection[str] = (),
) -> dict[str, Any]:
    """Copy a checkpoint into the live objects, bit by bit, each tensor to where it lives; returns the saved state.

    Tensors go from the file to the rank's own device, one at a time. Live tensors keep their strides; optimizer state
    of its parameter's shape gets that parameter's. What is None is left out.

    Args:
        keep: entries of the optimizer's groups whose live value stays: ("lr", "initial_lr") where the run changes it.

    Raises:
        UserError: with a list of the differences, where names, shapes, dtypes or the optimizer are others. Nothing is
            changed then.
    """
    try:
        tensors = {MODEL: read_tensors(loaded.path / MODEL)}
        lines = diff_tensors("model", tensors[MODEL], state_tensors(model))
        if ema is not None:
            if not loaded.has_ema:
                lines.append("ema: the checkpoint has no moving average, this run keeps one")
            else:
                tensors[EMA] = read_tensors(loaded.path / EMA)
                lines += diff_tensors("ema", tensors[EMA], state_tensors(ema))
        if optimizer is not None:
            lines += _diff_optimizer(loaded.document["optimizer"], model, optimizer)
            if not lines and not _is_whole(loaded, read_tensors(loaded.path / OPTIMIZER), optimizer):
                lines.append("optimizer: its state is not what its class keeps")
        scale = decode(loaded.document["scaler"]) if scaler is not None and loaded.document["scaler"] else None
        if scaler is not None and scale is not None and not _scales(scale, scaler.state_dict()):
            lines.append("scaler: its state is not what a gradient scaler keeps")
        _refuse(loaded, lines)
        _copy(model, tensors[MODEL])
        if ema is not None:
            _copy(ema, tensors[EMA])
        if optimizer is not None:
            _restore_optimizer(loaded, optimizer, keep)
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
    except (Damaged, OSError) as error:
        raise UserError(
            f"can't read the checkpoint {loaded.path}: {error}", "It was in order a moment ago: is its storage?"
        ) from error
    return loaded.state


def _scales(saved: Any, live: Mapping[str, Any]) -> bool:
    """Whether a scaler's saved state has the entries of a live one, each a number that it can have."""
    return (
        isinstance(saved, dict)
        and set(saved) == set(live)
        and all(type(value) in (int, float) and 0 <= value < float("inf") for value in saved.values())
    )


def _refuse(loaded: Loaded, lines: list[str]) -> None:
    if lines:
        shown = [*lines[:_SHOWN], *([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]
        raise UserError(
            "\n    ".join([f"{loaded.path} is not of this run (checkpoint -> now):", *shown]),
            "Resume with the model and optimizer that wrote it, or start another run with --out.",
        )


def _copy(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = state_tensors(model)
    copy_into(model, {name: part_of(tensor, own[name]) for name, tensor in tensors.items()})


def diff_tensors(what: str, saved: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> list[str]:
    """A line for each name, shape or dtype that is not the same in both."""
    lines = []
    for name in [*saved, *(name for name in now if name not in saved)]:
        before, after = (_describe(side[name]) if name in side else "(none)" for side in (saved, now))
        if before != after:
            lines.append(f"{what}: {name} {before} -> {after}")
    return lines


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _diff_optimizer(saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    name = type(optimizer).__qualname__
    if saved["class"] != name:
        return [f"optimizer: {saved['class']} -> {name}"]
    before, after = saved["parameters"], describe_parameters(model, optimizer)
    if before == after:
        return [] if _numbers_fit(saved, optimizer) else ["optimizer: its state is not what its class writes"]
    if not all(isinstance(group, list) and all(isinstance(each, list) for each in group) for group in before):
        return ["optimizer: its list of parameters is none"]
    if (sizes := [len(group) for group in before]) != (now := [len(group) for group in after]):
        return [f"optimizer: parameters by group {sizes} -> {now}"]
    return [
        f"optimizer: group {index}, parameter {number}: {' '.join(map(str, old))} -> {' '.join(map(str, new))}"
        for index, (olds, news) in enumerate(zip(before, after, strict=True))
        for number, (old, new) in enumerate(zip(olds, news, strict=True))
        if old != new
    ]


def _is_whole(loaded: Loaded, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of torch's usual optimizers has the entries and shapes that they keep for each parameter."""
    wanted = _KEPT.get(type(optimizer).__qualname__)
    saved = loaded.document["optimizer"]
    parameters = numbered(optimizer, saved["rest"])
    for index, entry in saved["state"] if wanted else ():
        names = {name: value.get("$tensor") if isinstance(value, dict) else value for name, value in entry.items()}
        own = {name for name in names if name != OUTER and not name.endswith(OF_RANKS)}
        if wanted is None or index not in parameters or (own ^ set(wanted)) - {"max_exp_avg_sq"}:
            return False
        for name, value in names.items():
            if value is None and name == "momentum_buffer":
                continue
            shape = torch.Size() if name == "step" else parameters[index].shape
            tensor = tensors.get(value) if isinstance(value, str) else None
            if tensor is None or not tensor.is_floating_point():
                return False
            if (tensor.shape[1:] if name.endswith(OF_RANKS) else tensor.shape) != shape:
                return False
    return True


def _numbers_fit(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Whether the saved groups and state belong to the parameters by their numbers, and nothing else is in them."""
    live = optimizer.state_dict()["param_groups"]
    numbers = [number for group in live for number in group["params"]]
    groups, indices = saved["rest"]["param_groups"], [index for index, _ in saved["state"]]
    return (
        [group.get("params") if isinstance(group, dict) else None for group in groups] == [g["params"] for g in live]
        and len(set(indices)) == len(indices)
        and all(isinstance(index, str) or index in numbers for index in indices)
        and all(isinstance(entry, dict) for _, entry in saved["state"])
        and all(isinstance(name, str) for name in saved["on_host"])
    )


def _restore_optimizer(loaded: Loaded, optimizer: torch.optim.Optimizer, keep: Collection[str]) -> None:
    saved, tensors = loaded.document["optimizer"], read_tensors(loaded.path / OPTIMIZER)
    on_host, made = set(saved["on_host"]), {}

    def place(name: str, key: str, home: Tensor) -> Tensor:
        if name not in made:
            made[name] = _placed(tensors[name], home, on_host=name in on_host or key == "step")
        return made[name]

    first = optimizer.param_groups[0]["params"][0]
    rest = decode(saved["rest"], partial(place, home=first))
    parameters = numbered(optimizer, rest)
    state = {index: decode(entry, partial(place, home=parameters.get(index, first))) for index, entry in saved["state"]}
    for group, live in zip(rest["param_groups"], optimizer.param_groups, strict=True):
        group.update({name: live[name] for name in (*_KERNELS, *keep) if name in live})
    optimizer.load_state_dict({**rest, "state": state})
    for index, entry in state.items():
        key = parameters.get(index, index)
        optimizer.state[key] = _uncast(optimizer.state[key], entry, "")


def _placed(source: Tensor, home: Tensor, on_host: bool) -> Tensor:
    """A copy of a mapped tensor beside its parameter or on the host; of the parameter's shape, it gets its strides."""
    if source.shape == home.shape and is_part(home) and not on_host:
        return part_of(source, home)
    device = torch.device("cpu") if on_host else home.device
    if source.shape == home.shape:
        return torch.empty_like(home.detach(), dtype=source.dtype, device=device).copy_(source)
    return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(source)


def _uncast(live: Any, ours: Any, key: str) -> Any:
    """`live` with what `load_state_dict` changed undone: it gives state the dtype and device of its parameter, which
    rounds what the optimizer keeps in a wider dtype. It knows best where a `step` goes.
    """
    if isinstance(ours, Tensor) and isinstance(live, Tensor):
        return live if key == "step" or (live.dtype, live.device) == (ours.dtype, ours.device) else ours
    if isinstance(ours, dict) and isinstance(live, dict):
        live.update({name: _uncast(live.get(name), value, str(name)) for name, value in ours.items()})
        return live
    if isinstance(ours, list | tuple) and isinstance(live, list | tuple) and len(ours) == len(live):
        return type(ours)(_uncast(a, b, key) for a, b in zip(live, ours, strict=True))
    return ours
