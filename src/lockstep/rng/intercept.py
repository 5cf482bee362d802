"""torch's random functions, replaced while a shard is in training: a keyed draw where there are keys, else torch's own.

The attributes themselves are replaced, which costs nothing an operator: a function mode would cost a model of many
small operators a third of its time, and is popped by a backward pass that computes checkpointed parts again.
Not seen: a function that a file imported by name before (`from torch.nn.functional import dropout`), torch.jit, and
what torch draws inside its kernels, as between the layers of an LSTM.
"""

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.rng import draws
from lockstep.rng.draws import Draws, Fill, Keys, Stream, active, current, here

_Function = Callable[..., Any]
_ALPHA = 1.7580993408473766  # minus the value that SELU saturates at


def _asked(kind: str, shape: Sequence[int], device: torch.device) -> Stream | None:
    keys = current()
    return None if keys is None else keys.call(kind, shape, device)


def _by_channel(batched: int) -> Callable[[Tensor], Sequence[int]]:
    """The shape of one draw for each channel, of an input that has `batched` dimensions with its batch."""

    def shape(x: Tensor) -> Sequence[int]:
        channels = 2 if x.dim() >= batched else 1
        return (*x.shape[:channels], *[1] * (x.dim() - channels))

    return shape


def _dropout(torchs: _Function, shape: Callable[[Tensor], Sequence[int]], alpha: bool = False) -> _Function:
    """One of torch.nn.functional's dropouts."""

    @functools.wraps(torchs)
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        stream = None
        if training and 0 < p <= 1:
            stream = _asked("dropout", shape(input), input.device)
        if stream is None:
            return torchs(input, p, training, inplace)  # type: ignore[no-any-return]
        mask, scale = stream.keep(p)
        if alpha:
            return _alpha_dropped(input, mask, scale, inplace)
        return (input.mul_(mask) if inplace else input * mask).mul_(scale)

    return dropout


def _alpha_dropped(x: Tensor, mask: Tensor, scale: float, inplace: bool) -> Tensor:
    """Klambauer et al., "Self-Normalizing Neural Networks", 2017: dropped to SELU's floor, mean and variance kept."""
    if not scale:
        return x.mul_(0) if inplace else x * 0
    rate = 1 / scale
    a = (rate * (1 + _ALPHA**2 * (1 - rate))) ** -0.5
    dropped = x.mul_(mask) if inplace else x * mask
    return dropped.sub_((~mask).to(x.dtype).mul_(_ALPHA)).mul_(a).add_(a * _ALPHA * (1 - rate))


def _plain_dropout(torchs: _Function, function: str) -> _Function:
    """torch.dropout and its like, whose arguments are (input, p, train), by the one of torch.nn.functional."""

    @functools.wraps(torchs)
    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        drawn: Tensor = torchs(input, p, train) if current() is None else getattr(F, function)(input, p, train)
        return drawn

    return dropout


def _attention(torchs: _Function) -> _Function:
    @functools.wraps(torchs)
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        stream = None
        if dropout_p > 0:
            shape = (*query.shape[:-1], key.shape[-2])
            stream = _asked("attention's dropout", shape, query.device)
        if stream is None:
            return torchs(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            heads = query.shape[-3]
            key, value = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (key, value))
        # the mathematical path: the fused kernels draw by themselves. O(L^2) memory
        scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
        if is_causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
            scores = scores.masked_fill(ahead, -math.inf)
        if attn_mask is not None:
            boolean = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if boolean else scores + attn_mask
        mask, factor = stream.keep(dropout_p)
        return (scores.softmax(-1) * mask).mul_(factor).to(value.dtype) @ value

    return scaled_dot_product_attention


def _rrelu(torchs: _Function) -> _Function:
    @functools.wraps(torchs)
    def rrelu(
        input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
    ) -> Tensor:
        stream = _asked("rrelu", input.shape, input.device) if training else None
        if stream is None:
            return torchs(input, lower, upper, training, inplace)  # type: ignore[no-any-return]
        slopes = stream.fill(draws.uniform).mul_(upper - lower).add_(lower).to(input.dtype)
        slopes = slopes.masked_fill_(input.detach() >= 0, 1)
        return input.mul_(slopes) if inplace else input * slopes

    return rrelu


def _made(torchs: _Function, empty: _Function, method: str) -> _Function:
    """torch.rand and its like: a new tensor, filled by a tensor's method."""

    @functools.wraps(torchs)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if current() is None or kwargs.get("generator") is not None:
            return torchs(*args, **kwargs)  # type: ignore[no-any-return]
        grad = kwargs.pop("requires_grad", False)
        kwargs.pop("generator", None)
        filled: Tensor = getattr(empty(*args, **kwargs), method)()
        return filled.requires_grad_() if grad else filled

    return made


def _normal(torchs: _Function) -> _Function:
    """torch.normal: of a mean and a deviation for each place, or of numbers and a shape."""

    @functools.wraps(torchs)
    def normal(mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
        tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
        own = kwargs.get("generator") is not None or "out" in kwargs
        if current() is None or own or any(tensor.is_complex() for tensor in tensors):
            return torchs(mean, std, **kwargs) if size is None else torchs(mean, std, size, **kwargs)  # type: ignore[no-any-return]
        if tensors:
            drawn = torch.empty_like(sum(tensors[1:], tensors[0]) if len(tensors) > 1 else tensors[0])
        else:
            kwargs.pop("generator", None)
            drawn = torch.empty(size, **kwargs)
        return drawn.normal_().mul_(std).add_(mean)

    return normal


def _multinomial(torchs: _Function) -> _Function:
    """torch.multinomial of one draw, or of several without replacement: the places whose race is won first."""

    @functools.wraps(torchs)
    def multinomial(input: Tensor, num_samples: int, replacement: bool = False, **kwargs: Any) -> Tensor:
        if current() is None or kwargs or (replacement and num_samples > 1):
            return torchs(input, num_samples, replacement, **kwargs)  # type: ignore[no-any-return]
        race = input / torch.empty_like(input).exponential_()
        return race.topk(num_samples, -1).indices

    return multinomial


def _bernoulli(torchs: _Function) -> _Function:
    @functools.wraps(torchs)
    def bernoulli(input: Tensor, p: float | None = None, **kwargs: Any) -> Tensor:
        if current() is None or kwargs:
            return torchs(input, **kwargs) if p is None else torchs(input, p, **kwargs)  # type: ignore[no-any-return]
        return torch.empty_like(input).bernoulli_(input if p is None else p)

    return bernoulli


def _in_place(torchs: _Function, fill: Callable[..., Fill], *names: str) -> _Function:
    """A tensor's method that fills it; `fill` takes its dtype and its arguments, which `names` may name."""

    @functools.wraps(torchs)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        known = self.is_floating_point() or fill is _filled_bernoulli
        stream = None
        if known and kwargs.get("generator") is None:
            stream = _asked(torchs.__name__.rstrip("_"), self.shape, self.device)
        if stream is None:
            return torchs(self, *args, **kwargs)  # type: ignore[no-any-return]
        given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        if len(given) == 1 and isinstance(p := given[0], Tensor):  # bernoulli's: a probability for each place
            return self.copy_(stream.fill(draws.uniform) < p)
        return self.copy_(stream.fill(fill(self.dtype, *given)))

    return method


def _filled_uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Fill:
    if (low, high) == (0.0, 1.0):
        return lambda keys, n: draws.uniform(keys, n, dtype)
    return lambda keys, n: draws.uniform(keys, n).mul_(high - low).add_(low)


def _filled_normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Fill:
    del dtype
    return lambda keys, n: draws.normal(keys, n).mul_(std).add_(mean)


def _filled_exponential(dtype: torch.dtype, lambd: float = 1.0) -> Fill:
    del dtype
    return lambda keys, n: draws.exponential(keys, n).div_(lambd)


def _filled_bernoulli(dtype: torch.dtype, p: float = 0.5) -> Fill:
    del dtype
    return lambda keys, n: draws.uniform(keys, n) < p


def _seeded(torchs: _Function) -> _Function:
    """One that draws for no sample in particular, on the host: from the micro-batch shard's own generator."""

    @functools.wraps(torchs)
    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        keys = current()
        if isinstance(keys, Keys) and kwargs.get("generator") is None and kwargs.get("device") in (None, "cpu", _HOST):
            kwargs["generator"] = keys.generator
            keys.unkeyed += 1
        return torchs(*args, **kwargs)  # type: ignore[no-any-return]

    return drawn


def _get_rng_state() -> Tensor:
    """torch's state, and after it that of the shard's own generator; `_set_rng_state` puts both back."""
    keys = current()
    return torch.cat([_get_state(), keys.generator.get_state()]) if isinstance(keys, Keys) else _get_state()


def _set_rng_state(new_state: Tensor) -> None:
    size, keys = len(_get_state()), current()
    _set_state(new_state[:size].clone())  # torch reads from the start of the memory, not of the view
    if len(new_state) > size and isinstance(keys, Keys):
        keys.generator.set_state(new_state[size:].clone())


_HOST = torch.device("cpu")
_get_state, _set_state = torch.get_rng_state, torch.set_rng_state
FUNCTIONAL: dict[str, _Function] = {
    "dropout": _dropout(F.dropout, Tensor.size),
    "dropout1d": _dropout(F.dropout1d, _by_channel(3)),
    "dropout2d": _dropout(F.dropout2d, _by_channel(3)),
    "dropout3d": _dropout(F.dropout3d, _by_channel(5)),
    "alpha_dropout": _dropout(F.alpha_dropout, Tensor.size, alpha=True),
    "feature_alpha_dropout": _dropout(F.feature_alpha_dropout, _by_channel(2), alpha=True),
    "scaled_dot_product_attention": _attention(F.scaled_dot_product_attention),
    "rrelu": _rrelu(F.rrelu),
}
TORCH: dict[str, _Function] = {
    "dropout": _plain_dropout(torch.dropout, "dropout"),
    "alpha_dropout": _plain_dropout(torch.alpha_dropout, "alpha_dropout"),
    "rand": _made(torch.rand, torch.empty, "uniform_"),
    "randn": _made(torch.randn, torch.empty, "normal_"),
    "rand_like": _made(torch.rand_like, torch.empty_like, "uniform_"),
    "randn_like": _made(torch.randn_like, torch.empty_like, "normal_"),
    "bernoulli": _bernoulli(torch.bernoulli),
    "normal": _normal(torch.normal),
    "multinomial": _multinomial(torch.multinomial),
    "randperm": _seeded(torch.randperm),
    "randint": _seeded(torch.randint),
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
}
TENSOR: dict[str, _Function] = {
    "bernoulli_": _in_place(Tensor.bernoulli_, _filled_bernoulli, "p"),
    "uniform_": _in_place(Tensor.uniform_, _filled_uniform, "from", "to"),
    "normal_": _in_place(Tensor.normal_, _filled_normal, "mean", "std"),
    "exponential_": _in_place(Tensor.exponential_, _filled_exponential, "lambd"),
}

PLACES: tuple[tuple[ModuleType, dict[str, Callable[..., Any]]], ...] = ((F, FUNCTIONAL), (torch, TORCH))

# of other libraries, by module and name: what draws by a tensor's method, which a compiler takes for torch's own
_DRAWING = {"torchvision.ops.stochastic_depth": "stochastic_depth", "timm.layers.drop": "drop_path"}
_lock = threading.Lock()
_users = 0
_Functions = dict[str, Callable[..., Any]]
_Names = tuple[dict[str, Any], _Functions, _Functions]  # a namespace, what is put into it, what stood there before
_taken: list[_Names] = []  # by `_users`


@cache
def _names(compiled: bool) -> list[_Names]:
    """What to put into which namespace. Compiled code is left at each function, where it would else draw by shard."""
    ours = list(PLACES)
    if compiled:
        off: Any = torch.compiler.disable
        ours = [(place, {name: off(f) for name, f in functions.items()}) for place, functions in PLACES]
        others = [(sys.modules[module], name) for module, name in _DRAWING.items() if module in sys.modules]
        ours += [(place, {name: off(getattr(place, name))}) for place, name in others]
    return [(vars(place), functions, {name: vars(place)[name] for name in functions}) for place, functions in ours]


@cache
def _replace_methods() -> None:
    """For good: a class that changes loses what Python keeps of it, which would cost every step tens of microseconds.

    Without keys each is torch's own, called by one more function.
    """
    for name, method in TENSOR.items():
        setattr(Tensor, name, method)


def _intercept(compiled: bool) -> None:
    """From here on, in all threads, torch's random functions ask for keys, until as many `_release`s."""
    global _users, _taken
    _replace_methods()
    if compiled and not _users:
        from torch._dynamo import trace_rules  # takes a second

        # The compiler lists torch's functions by their names, anew after each new process group (a check may make one):
        # while ours have these names, it would take them for torch's and not leave the graph.
        trace_rules.get_torch_obj_rule_map()
    with _lock:
        _users += 1
        if _users == 1:
            _taken = _names(compiled)
            for namespace, ours, theirs in _taken:
                if not all(map(is_, map(namespace.get, theirs), theirs.values())):  # somebody has replaced one since
                    theirs.update((name, namespace[name]) for name in ours)
                namespace.update(ours)


def _release() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            for namespace, _, theirs in _taken:
                namespace.update(theirs)


@contextmanager
def left_replaced(draws: Draws | None) -> Iterator[None]:
    """Around many steps: between them the functions stay replaced, where they are torch's own all the same.

    To replace them anew costs each step 10 us. For a loop alone between whose steps nobody else replaces one; and not
    where there is compiled code, whose compiler must find torch's between two steps.
    """
    if draws is None or draws.compiled:
        yield
        return
    _intercept(compiled=False)
    try:
        yield
    finally:
        _release()


class keyed(Keys):
    """Around forward and backward of one shard: its draws are those of its samples in this step of the run.

    A class: a generator's context, and each object and call of a function more, cost a step microseconds, for all of
    this is out of the processor's caches after a backward pass.
    """

    def __enter__(self) -> None:
        _intercept(self.draws.compiled)
        self.before = getattr(here, "keys", None)
        here.keys = self
        active.append(self)

    def __exit__(self, *_: object) -> None:
        here.keys = self.before
        active.remove(self)
        _release()
