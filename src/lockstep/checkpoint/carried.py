"""What a run's code keeps beside its state_dicts, in a checkpoint's JSON: attributes, lists, dicts, closures of hooks.

A run notes what that is as it begins (parallel/hidden_state.py); what has moved since goes into each checkpoint.
"""

import base64
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.errors import UserError
from lockstep.parallel.hidden_state import LENGTH, HiddenState, differing
from lockstep.parallel.module_state import driven
from lockstep.parallel.parameter_hooks import hooks_around

_LARGEST_CARRIED = 1 << 24  # bytes
_HOST = torch.device("cpu")
_STATE = "state of optimizer "
_NUMBERS = ("state", "param_groups", "defaults")  # of an optimizer: no other one is in there
_MOST_CARRIED = 1 << 27  # bytes; a JSON of twice that is taken for damaged


def hidden_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = None, average: nn.Module | None = None
) -> HiddenState:
    """What a run's parts keep outside of state_dicts, by now."""
    roots = {"": model, "optimizer": optimizer, "the loss": loss, "the average": average}
    inner = with_inner(optimizer)
    if len(inner) > 1:  # the state_dict of one around another may be that one's
        roots |= {f"{_STATE}{i}": vars(each).get("state") for i, each in enumerate(inner)}
    given = {name: root for name, root in roots.items() if root is not None}
    return HiddenState(given | hooks_around(model, optimizer))


def moved_since(
    began: HiddenState,
    now: HiddenState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: nn.Module | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """What differs between two states and is in no state_dict, for JSON; and what can't go there."""
    before = began.containers
    own = {*model.state_dict(), *(f"the average.{name}" for name in (average.state_dict() if average else ()))}
    known = {id(each) for each in tree_leaves(optimizer.state_dict()) if isinstance(each, Tensor)}
    states = {name: held for name, (held, _) in now.containers.items() if name.startswith(_STATE) and "[" not in name}
    tensors = {name: {id(t) for t in tree_leaves(held) if isinstance(t, Tensor)} for name, held in states.items()}
    covered = tuple(name for name, ids in tensors.items() if ids <= known)

    def is_ours(name: str) -> bool:
        return name not in own and not name.startswith(covered)

    moved = [name for each in differing(began, now) if is_ours(name := each.removeprefix(LENGTH))]
    # what has other elements than at first goes as a whole, and so does a tuple
    grown = [n for n, (_, shape) in now.containers.items() if is_ours(n) and (n not in before or before[n][1] != shape)]
    whole = {name: held for name, (held, _) in now.containers.items() if isinstance(held, tuple) or name in moved}
    whole |= {name: now.containers[name][0] for name in grown}

    def outermost(name: str) -> str:
        return min((each for each in (name, *whole) if name == each or name.startswith(f"{each}[")), key=len)

    names, room = {id(p): name for name, p in model.named_parameters()}, _MOST_CARRIED
    found, lost, said = dict[str, Any](), list[str](), {*map(outermost, moved)}
    for name in dict.fromkeys(map(outermost, [*moved, *grown])):  # what has grown may hold what has another name
        value = whole.get(name, now.values.get(name, now))
        room -= sum(getattr(each, "nbytes", 0) for each in tree_leaves(value))
        if room >= 0 and (kept := packed(value, names)) is not None:
            found[name] = kept
        elif name in said:
            lost.append(name)
    return found, lost


def with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer and those that it holds, as one of Lookahead's kind does; each once."""
    found = [optimizer]
    for each in found:
        inside = tree_leaves({key: value for key, value in vars(each).items() if key not in _NUMBERS})
        found += [o for o in inside if isinstance(o, torch.optim.Optimizer) and all(o is not known for known in found)]
    return found


def lost_line(names: list[str]) -> str:
    """What is said where a checkpoint can't hold everything."""
    return (
        f"no checkpoint holds {', '.join(names[:3])}, which training moves: a run that is resumed goes on otherwise "
        "than one that went through"
    )


def hand_over(now: HiddenState, saved: Mapping[str, Any], model: nn.Module) -> None:
    """Put what `moved_since` found where it belongs. Raises UserError for what no run has written."""
    parameters, device = dict(model.named_parameters()), driven(model)[0]
    try:
        for name, value in saved.items():
            if not now.give(name, unpacked(value, parameters, device)):
                raise KeyError(name)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise UserError(
            f"the checkpoint holds what this model does not keep: {error}",
            "Resume with the model, optimizer and loss that wrote it; in your own loop, when the TrainStep is made.",
        ) from error


def packed(value: Any, names: Mapping[int, str] | None = None) -> Any:
    """A value of a HiddenState for a checkpoint's JSON; None where it can't be kept there.

    Args:
        names: of parameters, by their ids: they, and ids of theirs that are keys of a dict, are kept by name.
    """
    names = names or {}
    if id(value) in names:
        return {"parameter": names[id(value)]}
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or hasattr(value, "full_tensor"):
            return None
        there, value = value.device.type != "cpu", value.detach().cpu().contiguous()
        kind = str(value.dtype).removeprefix("torch.")
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _packed_bytes("on device" if there else "tensor", kind, value.shape, data)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufc":
            return None
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return _packed_bytes(kind, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, set):
        return {"set": [*value]} if all(isinstance(each, int | str) for each in value) else None
    if isinstance(value, dict):
        keys = [{"id": names[key]} if isinstance(key, int) and key in names else packed(key, names) for key in value]
        each = [packed(one, names) for one in value.values()]
        return None if None in (*keys, *each) else {"dict": [keys, each]}
    if isinstance(value, list | tuple | deque | array | bytearray) and not hasattr(value, "_fields"):  # a namedtuple
        each = [packed(one, names) for one in value]
        return None if None in each else {"tuple" if isinstance(value, tuple) else "list": each}
    return {"plain": value} if isinstance(value, bool | int | float | str | type(None)) else None


def _packed_bytes(kind: str, dtype: str, shape: Iterable[int], data: bytes) -> dict[str, Any] | None:
    return {kind: [dtype, list(shape), base64.b64encode(data).decode()]} if len(data) <= _LARGEST_CARRIED else None


def unpacked(value: Any, parameters: Mapping[str, Tensor] | None = None, device: torch.device = _HOST) -> Any:
    """The inverse of `packed`, with the parameters by name. Raises ValueError for what that never makes."""
    parameters = parameters or {}
    again = partial(unpacked, parameters=parameters, device=device)
    match value:
        case {"parameter": str(name)} if name in parameters:
            return parameters[name]
        case {"id": str(name)} if name in parameters:
            return id(parameters[name])
        case {"on device": data}:
            return unpacked({"tensor": data}).to(device)
        case {"number": data}:
            return unpacked({"array": data})[()]
        case {"plain": bool() | int() | float() | str() | None as plain}:
            return plain
        case {"tensor": [str(dtype), list(shape), str(data)]} if isinstance(getattr(torch, dtype, None), torch.dtype):
            flat = torch.frombuffer(bytearray(base64.b64decode(data)) or bytearray(1), dtype=torch.uint8)
            return flat[: len(flat) if data else 0].view(getattr(torch, dtype)).view(shape)
        case {"array": [str(dtype), list(shape), str(data)]} if np.dtype(dtype).kind in "biufc":
            return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        case {"set": list(items)}:
            return set(items)
        case {"dict": [list(keys), list(items)]}:
            return dict(zip(map(again, keys), map(again, items), strict=True))
        case {"list": list(items)}:
            return [*map(again, items)]
        case {"tuple": list(items)}:
            return tuple(map(again, items))
    raise ValueError("it is no value of a hidden state")
