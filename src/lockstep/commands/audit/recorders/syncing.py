"""Where the host waits for the device: values that are read back, and tensors that are printed."""

import inspect
from typing import Any

import torch

from lockstep.commands.audit.events import emit, silence
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


def install(plan: Plan) -> None:
    """Record each of the user's own lines that reads a device's tensor back: a scaler's lines do too."""
    for name, kind in _READS.items():
        around(torch.Tensor, name, _recorded(kind, plan.home.rstrip("/") + "/"))


def _recorded(kind: str, home: str) -> Any:
    def read(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _inside[0]:
            return original(tensor, *args, **kwargs)
        _inside[0] = True
        try:
            with silence():
                device = tensor.device.type
            here = inspect.currentframe()
            patched = here.f_back if here else None  # by `around`
            caller = patched.f_back if patched else None
            if caller is not None and device != "cpu" and (name := caller.f_code.co_filename).startswith(home):
                emit("sync", at=f"{name.removeprefix(home)}:{caller.f_lineno}", kind=kind)
            return original(tensor, *args, **kwargs)
        finally:
            _inside[0] = False

    return read
