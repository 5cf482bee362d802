"""Tensors that say they are on a GPU and are in the CPU's memory."""

# ruff: noqa: ARG001, ARG005, B010  the signatures are torch's

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors

from lockstep.commands.audit.events import ORIGINAL
from lockstep.commands.audit.pretended.cuda import Pretend

CPU = -1
TAG = "_lockstep_place"
BASE = torch._C.TensorBase

# What torch refuses on tensors of two places; a tensor without dimensions may come from anywhere.
_MUST_AGREE = {
    *("linear", "conv1d", "conv2d", "conv3d", "matmul", "mm", "bmm", "addmm", "batch_norm", "layer_norm", "embedding"),
    *("add", "sub", "mul", "div", "eq", "__matmul__", "__add__", "__sub__", "__mul__", "__truediv__", "cat", "stack"),
    *("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "l1_loss"),
}

DRAWS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu"),
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "lstm", "gru"),
    *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"),
    *("log_normal_", "cauchy_", "geometric_", "gumbel_softmax", "trunc_normal_"),
    *("scaled_dot_product_attention", "multi_head_attention_forward"),
}


def place(tensor: Any) -> int | None:
    """A tensor's pretended place: a GPU's index, CPU, or None where it isn't known."""
    return tensor.__dict__.get(TAG)  # type: ignore[no-any-return]


def put(thing: Any, where: int | None) -> Any:
    """Tag a tensor, or the tensors of a list or tuple; returns it."""
    if isinstance(thing, torch.Tensor):
        if where is None:
            thing.__dict__.pop(TAG, None)
        else:
            thing.__dict__[TAG] = where
    elif isinstance(thing, list | tuple):
        for each in thing:
            put(each, where)
    return thing


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments, and in lists among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return found


def common(tensors: list[torch.Tensor]) -> int | None:
    """Where the result of a function of these tensors is."""
    if not tensors:
        return CPU
    places = [place(each) for each in tensors]
    gpu = next((each for each in places if each is not None and each >= 0), None)
    return gpu if gpu is not None else (CPU if all(each == CPU for each in places) else None)


def refuse_two_places(name: str, tensors: list[torch.Tensor]) -> None:
    """Raise what torch raises when a function gets tensors of two devices."""
    places = {place(each) for each in tensors if each.dim() > 0} - {None}
    if len(places) > 1:
        named = " and ".join(sorted("cpu" if each == CPU else f"cuda:{each}" for each in places))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {named}! "
            f"(when checking the arguments of {name})"
        )


def _widened(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of several float types in float32, in which autocast computes here."""

    def wide(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(wide, value))
        half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return put(value.float(), place(value)) if half else value

    return tuple(map(wide, values))


class Places(TorchFunctionMode):
    """Tags the results of torch's functions, and lets draws on a GPU come from that GPU's random state."""

    def __init__(self, pretend: Pretend) -> None:
        super().__init__()
        self.pretend = pretend

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call it, and tag what it returns."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        while (original := getattr(func, ORIGINAL, None)) is not None:  # torch finds what stands in its place
            func = original
        tensors = tensors_in((*args, *kwargs.values()))
        if name == "__set__":
            func(*args, **kwargs)
            if getattr(func, "__self__", None) is BASE.data:
                put(args[0], place(args[1]))
            return None
        if name in _MUST_AGREE:
            refuse_two_places(name, tensors)
            if (
                torch.is_autocast_enabled("cuda")
                and len({each.dtype for each in tensors if each.is_floating_point()}) > 1
            ):
                args, kwargs = _widened(args), dict(zip(kwargs, _widened(tuple(kwargs.values())), strict=True))
        where = common(tensors)
        if name in DRAWS and where is not None and where >= 0 and kwargs.get("generator") is None:
            with self.pretend.drawing_on(where):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            given = any(result is each for each in tensors)
            return result if given or place(result) is not None else put(result, where)
        return put(result, where) if isinstance(result, tuple | list) and tensors else result


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
                name = torch_type(self)
            return name.replace("torch.", "torch.cuda.") if self.is_cuda else name
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
    """A function whose `device` may be a GPU: called for the CPU and tagged."""
    name = function.__name__

    @functools.wraps(function)
    def created(*args: Any, **kwargs: Any) -> Any:
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

    return created


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
        parameter = torch_new(cls, data, requires_grad)
        return parameter if data is None else put(parameter, place(data))

    setattr(torch.nn.Parameter, "__new__", staticmethod(new))
