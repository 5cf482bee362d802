"""Where the host waits for the device: values that are read back, and tensors that are printed."""

from typing import Any

import torch

from lockstep.commands.audit.events import emit, silence, user_line
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders.patching import around

# method -> how it is told
_READS = {
    "item": "item",
    "tolist": "tolist",
    "cpu": "cpu",
    "numpy": "numpy",
    "__bool__": "bool",
    "__float__": "float",
    "__int__": "int",
    "__repr__": "print",
    "__format__": "print",
}
_inside = [False]


def install(_plan: Plan) -> None:
    """Record each of the user's own lines that reads a tensor of a device back."""
    for name, kind in _READS.items():
        around(torch.Tensor, name, _recorded(kind))


def _recorded(kind: str) -> Any:
    def read(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _inside[0]:
            return original(tensor, *args, **kwargs)
        _inside[0] = True
        try:
            with silence():
                device = tensor.device.type
            if device != "cpu" and (at := user_line()):
                emit("sync", at=at, kind=kind)
            return original(tensor, *args, **kwargs)
        finally:
            _inside[0] = False

    return read
