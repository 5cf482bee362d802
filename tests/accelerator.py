"""A pretended accelerator: a device type of its own whose tensors hold their data on the host.

`with pretended(count, own) as seen:` makes `torch.device("pretend", own)` this process's accelerator, among `count`.
Lockstep's own code then takes the paths that it takes on a GPU: copies, streams, collectives. What a GPU would punish
is an error here, or noted with its place:

- an operator over tensors of two devices raises, as torch does;
- `seen.waits`: what would make the host wait for the device (reading a value, a copy that is not from pinned memory);
- `seen.collectives`: each with the devices of its tensors;
- `seen.streamed`: tensors whose memory another stream was told of.

A device type can't be taken back, so this is for a process of its own: see tests/ranks.py. torch's engine counts one
device of such a type; the index that Python sees is the wrapper's.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

KIND = "pretend"
HOST = torch.device("cpu")
_TORCH, _HERE = str(Path(torch.__file__).parent), __file__
_BETWEEN = ("_python_dispatch.py", "_ops.py", "_pytree.py", "_compile.py", "eval_frame.py")  # callers and this file
# operators whose result's shape or value the host has to know
_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique", "_unique2", "bincount")


@dataclass
class Seen:
    """What happened on the device since the lists were emptied."""

    waits: list[str] = field(default_factory=list)  # "what, file:line the line"
    collectives: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # name, devices
    streamed: int = 0

    def clear(self) -> None:
        self.waits.clear()
        self.collectives.clear()
        self.streamed = 0


class _Module(_DummyBackendModule):
    """What torch.get_device_module returns."""

    def __init__(self, count: int, own: int) -> None:
        self.count, self.own = count, own

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.own

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: torch.device) -> Tensor:
        del device
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        del device
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, device: object) -> str:
        del device
        return "Pretended"


class OnDevice(Tensor):
    """A tensor of the pretended device; `held` is its data, on the host."""

    held: Tensor
    number: int

    @staticmethod
    def __new__(cls: type["OnDevice"], inner: Tensor, index: int) -> "OnDevice":
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(KIND, 0),
        )  # fmt: skip
        made.held, made.number = inner, index
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(KIND, self.number)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        _state().wait("tolist")
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r}, {self.number})"

    def __tensor_flatten__(self) -> tuple[list[str], int]:  # nn.Module.to swaps such tensors
        return ["held"], self.number

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], index: int, *_: object) -> "OnDevice":
        return OnDevice(inner["held"], index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types
        return _state().run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees the operators that have no tensor of the device among their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _state().run(func, args, kwargs or {})


class _Device:
    """Runs operators for the device."""

    def __init__(self, own: int) -> None:
        self.own, self.seen = own, Seen()
        self.pinned: dict[int, Tensor] = {}

    def wait(self, what: str) -> None:
        self.seen.waits.append(f"{what}, {_place()}")

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        flat, spec = pytree.tree_flatten((args, kwargs))
        here = [t for t in flat if isinstance(t, OnDevice)]
        there = [t for t in flat if isinstance(t, Tensor) and not isinstance(t, OnDevice)]
        to = next((torch.device(d) for d in flat if isinstance(d, torch.device)), None)
        if func.namespace == "c10d":
            tensors = {str(t.device) for t in [*here, *there]}
            self.seen.collectives.append((name, tuple(sorted(tensors))))
        if not here and (to is None or to.type != KIND):
            return self._on_host(name, func, args, kwargs)
        if name == "record_stream":
            self.seen.streamed += 1
            return None
        self._note(name, flat, here, there, to)
        index = self._index(name, here, to)
        inner = [t.held if isinstance(t, OnDevice) else HOST if isinstance(t, torch.device) else t for t in flat]
        in_args, in_kwargs = pytree.tree_unflatten(inner, spec)
        if "pin_memory" in in_kwargs:
            in_kwargs["pin_memory"] = False
        out = func(*in_args, **in_kwargs)
        if to is not None and to.type == "cpu":
            return out
        known = {id(t.held): t for t in here}

        def wrapped(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            return known[id(t)] if id(t) in known else OnDevice(t, index)

        out = pytree.tree_map(wrapped, out)
        if func.namespace != "aten" or name.startswith("_foreach") or name.startswith("_fused"):
            return out
        return return_and_correct_aliasing(func, args, kwargs, out)

    def _on_host(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "is_pinned":
            return self._is_pinned(args[0])
        pinned = name == "_pin_memory" or kwargs.get("pin_memory")
        if pinned and name != "_pin_memory":
            kwargs = {**kwargs, "pin_memory": False}
        made = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
        if pinned:
            self.pinned[made.untyped_storage().data_ptr()] = made  # kept, so that its address stays its own
        return made

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in self.pinned

    def _note(
        self, name: str, flat: list[Any], here: list[OnDevice], there: list[Tensor], to: torch.device | None
    ) -> None:
        """Note a wait; raise for tensors of two devices."""
        if name in _READS:
            self.wait(name)
        if name == "_to_copy" or name == "copy_":
            if (there or (to is not None and to.type == "cpu")) and not any(map(self._is_pinned, there)):
                self.wait(f"{name} between host and device")
            return
        if name in ("index", "index_put_", "_index_put_impl_") and any(
            isinstance(t, Tensor) and t.dtype == torch.bool for t in flat[1:]
        ):
            self.wait("an index of truth values")
        strangers = [t for t in there if t.ndim]
        if (here and strangers) or len({t.number for t in here}) > 1:
            devices = sorted({str(t.device) for t in [*here, *strangers]})
            raise RuntimeError(f"{name} over tensors of {' and '.join(devices)}, {_place()}")

    def _index(self, name: str, here: list[OnDevice], to: torch.device | None) -> int:
        """Of the device of the result."""
        if to is None or to.type != KIND:
            return here[0].number
        # torch's own C++ knows one device of this kind: what it makes by itself is on this process's
        if name == "scalar_tensor":
            return self.own
        own = name != "_to_copy" and (here or torch._C._current_graph_task_id() != -1 or _caller().startswith(_TORCH))
        return self.own if to.index is None or (own and to.index == 0) else to.index


_device: _Device | None = None


def _state() -> _Device:
    assert _device is not None
    return _device


def _caller() -> str:
    """The file of who called the operator."""
    frame = sys._getframe()
    while frame.f_code.co_filename == _HERE or frame.f_code.co_filename.endswith(_BETWEEN):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_filename


def _place() -> str:
    """The nearest line that is not torch's."""
    frames = [f for f in traceback.extract_stack() if f.filename != _HERE and not f.filename.startswith(_TORCH)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line}"


@contextmanager
def pretended(count: int, own: int) -> Iterator[Seen]:
    """Within, `count` devices of the kind "pretend", of which `own` is this process's. Once in a process."""
    global _device
    module = _Module(count, own)
    _device = _Device(own)
    _setup_privateuseone_for_python_backend(KIND, module)
    torch.__future__.set_swap_module_params_on_conversion(True)
    accelerator: Any = torch.accelerator
    accelerator.get_memory_info = lambda device=None: (1 << 34, 1 << 34)
    accelerator.max_memory_allocated = lambda device=None: 1 << 20
    accelerator.device_count = module.device_count
    accelerator.set_device_index = lambda index: None
    torch.tensor = _tensor(torch.tensor)  # its copy to the device is no operator that a mode sees
    with _Mode():
        yield _device.seen


def _tensor(torchs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        made = torchs(data, **kwargs)
        return made if device is None or torch.device(device).type != KIND else made.to(device)

    return tensor
