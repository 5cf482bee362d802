"""Tensors that say they are on a GPU and are in the CPU's memory.

A tensor's pretended place is a tag in its __dict__: an index from 0 is a GPU, CPU what is known to be there; none
where it can't be told (made in a worker, a thread of the script's, or by autograd in C++), which answers as the CPU and
is never refused.

Results are tagged by a TorchFunctionMode, which is this thread's, and costs about 4 us a call. moves.py has what takes
a device.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lockstep.commands.audit.pretended.state import Pretend
from lockstep.commands.audit.recorders.patching import ORIGINAL

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
    *(
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
        "rrelu",
        "lstm",
        "gru",
    ),
    *(
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "bernoulli",
        "multinomial",
        "poisson",
        "rand_like",
        "randn_like",
    ),
    *(
        "randint_like",
        "normal_",
        "uniform_",
        "bernoulli_",
        "random_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
    ),
    *("scaled_dot_product_attention", "multi_head_attention_forward", "gumbel_softmax", "trunc_normal_"),
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
