"""What moves a tensor, makes one on a device, or says where one is: put in the place of torch's, for all threads."""

# ruff: noqa: ARG001, ARG005, B010  the signatures are torch's, and type checkers would not have its methods replaced

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from lockstep.commands.audit.pretended.state import Pretend
from lockstep.commands.audit.pretended.tensors import BASE, CPU, DRAWS, Places, place, put


def install(pretend: Pretend) -> None:
    """Put the functions in torch's places, and begin to tag results in this thread."""
    _properties()
    _moves(pretend)
    for function in _device_constructors() | _like():
        _factory(pretend, function)
    for name in ("new_tensor", "new_zeros", "new_ones", "new_full", "new_empty"):
        setattr(torch.Tensor, name, _rewritten(pretend, getattr(torch.Tensor, name)))
    _default_device(pretend)
    _parameters()
    _backward(pretend)
    Places(pretend).__enter__()  # type: ignore[no-untyped-call]


def _properties() -> None:
    def device(self: torch.Tensor) -> torch.device:
        where = place(self)
        if where is not None and where >= 0:
            return torch.device("cuda", where)
        return BASE.device.__get__(self)

    def is_cuda(self: torch.Tensor) -> bool:
        return get_device(self) >= 0

    def get_device(self: torch.Tensor) -> int:
        where = place(self)
        return CPU if where is None else where

    torch_type = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        name = dtype if isinstance(dtype, str) else ""
        if dtype is None:
            with torch._C.DisableTorchFunction():
                said = torch_type(self)
            return said.replace("torch.", "torch.cuda.") if self.is_cuda else said
        if name.startswith("torch.cuda."):
            return torch_type(self, name.replace("torch.cuda.", "torch."), non_blocking, **kwargs).cuda()
        return torch_type(self, dtype, non_blocking, **kwargs)

    setattr(torch.Tensor, "device", property(device))
    setattr(torch.Tensor, "is_cuda", property(is_cuda))
    setattr(torch.Tensor, "is_cpu", property(lambda self: not self.is_cuda and self.device.type == "cpu"))
    for name, function in {"get_device": get_device, "type": type_}.items():
        setattr(torch.Tensor, name, function)


def _backward(pretend: Pretend) -> None:
    """Hooks and checkpointed parts run inside backward, for which torch takes a mode away."""
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with Places(pretend):
            return engine(*args, **kwargs)

    setattr(torch.autograd, "_engine_run_backward", run_backward)


def _moves(pretend: Pretend) -> None:
    """`to`, `cuda`, `cpu` and what only a GPU has a use for."""
    torch_to = torch.Tensor.to

    def moved(tensor: torch.Tensor, where: int, *rest: Any, **kwargs: Any) -> torch.Tensor:
        """`rest`: dtype, non_blocking, copy. From one place to another is a copy, whatever the script says."""
        now = place(tensor)
        with torch._C.DisableTorchFunction():  # the mode would call what stands in torch's place: this again
            if now == where or (now is None and where == CPU):
                return put(torch_to(tensor, "cpu", *rest, **kwargs), now)  # type: ignore[no-any-return]
            return put(torch_to(tensor, "cpu", *rest[:2], **{**kwargs, "copy": True}), where)  # type: ignore[no-any-return]

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            where = place(args[0])
            rest = (args[0].dtype, *args[1:])
            return torch_to(self, *args, **kwargs) if where is None else moved(self, where, *rest, **kwargs)
        named = args[:1] if args and isinstance(args[0], str | int | torch.device) else ()
        wanted = kwargs.pop("device", None) if not named else named[0]
        where = pretend.index(wanted, "tensor")
        if where is None:
            if wanted is None:
                return torch_to(self, *args, **kwargs)
            if torch.device(wanted).type != "cpu":
                return torch_to(self, wanted, *args[len(named) :], **kwargs)
        return moved(self, CPU if where is None else where, *args[len(named) :], **kwargs)

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        where = pretend.index("cuda" if device is None else device, "tensor")
        return moved(self, 0 if where is None else where, **kwargs)

    torch_detach = torch.Tensor.detach
    methods: dict[str, Callable[..., Any]] = {
        "detach": lambda self: put(
            torch_detach(self), place(self)
        ),  # hooks call it inside a function, where the mode is off
        "to": to,
        "cuda": cuda,
        "cpu": lambda self, **kwargs: moved(self, CPU, **kwargs),
        "pin_memory": lambda self, device=None: self,
        "is_pinned": lambda self, device=None: False,
        "record_stream": lambda self, stream: None,
    }
    for name, function in methods.items():
        setattr(torch.Tensor, name, functools.wraps(getattr(torch.Tensor, name))(function))


def _like() -> set[Any]:
    names = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
    return {getattr(torch, name) for name in (*names, "from_numpy", "normal") if hasattr(torch, name)}


def _rewritten(pretend: Pretend, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose `device` may be a GPU: made on the CPU and tagged."""
    name = function.__name__

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        where = pretend.index(device, "tensor")
        if where is None:
            result = function(*args, **kwargs)
            if isinstance(device, torch.device) and device.type == "cpu":  # perhaps that of a tensor of unknown place
                put(result, None)
            return result
        kwargs["device"] = "cpu"
        if kwargs.pop("pin_memory", False):
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if name in DRAWS and kwargs.get("generator") is None:
            with pretend.drawing_on(where):
                return put(function(*args, **kwargs), where)
        return put(function(*args, **kwargs), where)

    return made


def _factory(pretend: Pretend, function: Callable[..., Any]) -> None:
    home: Any = torch.fft if function.__name__.startswith("fft_") else torch
    name = function.__name__.removeprefix("fft_")
    if getattr(home, name, None) is function:
        setattr(home, name, _rewritten(pretend, function))


def _default_device(pretend: Pretend) -> None:
    """`torch.set_default_device("cuda")`, `with torch.device("cuda"):`; torch answers them by a mode of this class."""
    constructors = set(_device_constructors())  # asked before the functions were replaced

    def torch_function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in constructors and kwargs.get("device") is None:
            where = pretend.index(self.device, "tensor")
            result = func(*args, **{**kwargs, "device": self.device if where is None else "cpu"})
            return result if where is None else put(result, where)
        return func(*args, **kwargs)

    setattr(DeviceContext, "__torch_function__", torch_function)


def _parameters() -> None:
    torch_new = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        made = torch_new(cls, data, requires_grad)
        return made if data is None else put(made, place(data))

    setattr(torch.nn.Parameter, "__new__", staticmethod(new))
