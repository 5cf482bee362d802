"""Suspects for a difference between two numbers of processes, and how each is switched off in a run."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lockstep.config import Config, LinkConfig
from lockstep.training.assemble import Run

FLOAT64 = "summation order"  # off: everything in float64, where another order of a sum changes the 16th digit
UNEVEN = "uneven shares"  # off: a batch that all numbers of processes divide, and no short last one
BATCH_NORM = "batch statistics"  # off: batch norm uses fixed statistics
DROPOUT = "dropout"  # off: random draws of the forward pass give their expected value
AUGMENTATION = "augmentation"  # off: images as evaluation sees them
COMPRESSION = "compression"  # off: gradients travel as they are
LEARNING_RATE = "learning rate"  # off: each step's rate is the one given

_CALIBRATION = 64  # samples that fixed statistics are taken from


def adapted(config: Config, off: Sequence[str], processes: Sequence[int]) -> Config:
    """The config with what can be switched off there switched off."""
    if FLOAT64 in off:
        config = replace(config, precision="fp32", model=replace(config.model, compile=False))
    if COMPRESSION in off:
        config = replace(config, link=LinkConfig())
    if UNEVEN in off:
        batch = even_batch(config, processes)
        config = replace(config, batch_size=batch, data=replace(config.data, drop_last=True))
    return config


def even_batch(config: Config, processes: Sequence[int]) -> int:
    """The next smaller batch size that all numbers of processes and pieces divide, or the least such."""
    unit = math.lcm(*processes, config.exact or 1) * (1 if config.exact else config.accumulate)
    return max(config.batch_size // unit, 1) * unit


def has_batch_norm(model: nn.Module) -> bool:
    """True where a layer normalises by the statistics of its batch."""
    return any(isinstance(m, _BatchNorm) and m.training for m in model.modules())


@contextmanager
def switched_off(run: Run, off: Sequence[str], lr: Sequence[Sequence[float]]) -> Iterator[None]:
    """Within, the run's steps go without these suspects; the run is spoilt for anything else."""
    with ExitStack() as stack:
        if AUGMENTATION in off:
            _show_plain_images(run)
        if FLOAT64 in off:
            _widen_images(run)
        if BATCH_NORM in off:
            _fix_statistics(run, torch.float64 if FLOAT64 in off else None)
        if LEARNING_RATE in off:
            _pin_rates(run, lr)
        if DROPOUT in off:
            stack.enter_context(ExpectedDraws())
        yield


def _show_plain_images(run: Run) -> None:
    loader, plain, read = run.train, run.val.augment, run.train.read
    loader.augment = lambda images, ids, _: plain(images, ids, None)  # type: ignore[assignment]
    loader.read = lambda requests: read((ids, None) for ids, _ in requests)


def _widen_images(run: Run) -> None:
    augment = run.train.augment
    run.train.augment = lambda *args: augment(*args).double()  # type: ignore[assignment]


@torch.no_grad()
def _fix_statistics(run: Run, dtype: torch.dtype | None) -> None:
    """Batch norm in evaluation mode, with the statistics of the same few samples on every rank.

    Not those of the start, 0 and 1, by which a deep network's activations and gradients may grow without bound.
    """
    layers = [m for m in run.model.modules() if isinstance(m, _BatchNorm) and m.training]
    for layer in layers:
        if layer.running_mean is None and layer.num_features:
            like = next(run.model.parameters()).new_zeros(layer.num_features)
            layer.running_mean, layer.running_var = like, torch.ones_like(like)
            layer.track_running_stats = True
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 1.0
    images, _, ids = next(iter(run.train.read([(run.train.order.step(0, 0)[:_CALIBRATION], None)])))
    with ExpectedDraws():
        run.model(run.val.augment(images, ids, None).to(dtype))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        layer.training = False


def _pin_rates(run: Run, lr: Sequence[Sequence[float]]) -> None:
    rates = iter(lr)

    def pin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        for group, rate in zip(optimizer.param_groups, next(rates), strict=True):
            group["lr"] = rate

    run.step.optimizer.register_step_pre_hook(pin)


class ExpectedDraws(TorchFunctionMode):
    """Within, random draws give their expected value: dropout passes its input on, uniform numbers are 0.5."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.multi_head_attention_forward:
            kwargs["training"] = False  # nothing but its dropout depends on it
        elif func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
        drawn = func(*args, **kwargs)
        return _expected(func, drawn, args, kwargs) if func in _DRAWS else drawn


def _expected(func: Any, drawn: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Overwrite what was drawn, in place, by its expected value."""
    given = [kwargs.get(name, args[i] if len(args) > i else default) for i, (name, default) in enumerate(_DRAWS[func])]
    match func:
        case torch.Tensor.bernoulli_:
            return drawn.copy_(torch.as_tensor(given[1]))
        case torch.bernoulli:
            return drawn.copy_(given[0])
        case torch.Tensor.uniform_:
            return drawn.fill_((given[1] + given[2]) / 2)
        case torch.Tensor.normal_:
            return drawn.fill_(given[1])
    return drawn.fill_(0.5 if func in (torch.rand, torch.rand_like) else 0.0)


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip
_SELF = ("self", None)
_DRAWS: dict[Any, tuple[tuple[str, Any], ...]] = {  # the arguments that decide the expected value, and their defaults
    torch.Tensor.bernoulli_: (_SELF, ("p", 0.5)),
    torch.Tensor.uniform_: (_SELF, ("from", 0.0), ("to", 1.0)),
    torch.Tensor.normal_: (_SELF, ("mean", 0.0)),
    torch.bernoulli: (("input", None),),
    torch.rand: (),
    torch.rand_like: (),
    torch.randn: (),
    torch.randn_like: (),
}
