"""Suspects for a difference between two numbers of processes, and how each is switched off in a run."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lockstep.commands.verify import causes
from lockstep.config import Config, LinkConfig
from lockstep.parallel.batchnorm import batch_norms
from lockstep.training.assemble import Run

_CALIBRATION = 64  # samples that fixed statistics are taken from


def adapted(config: Config, off: Sequence[str], processes: Sequence[int]) -> Config:
    """The config with what can be switched off there switched off."""
    if causes.FLOAT64 in off:
        config = replace(config, precision="fp32", model=replace(config.model, compile=False))
    if causes.COMPRESSION in off:
        config = replace(config, link=LinkConfig())
    if causes.CLIPPING in off:
        config = replace(config, optim=replace(config.optim, clip_norm=0.0))
    if causes.ACCUMULATION in off:
        config = replace(config, accumulate=1)
    if causes.UNEVEN in off:
        batch = even_batch(config, processes)
        config = replace(config, batch_size=batch, data=replace(config.data, drop_last=True))
    return config


def even_batch(config: Config, processes: Sequence[int]) -> int:
    """The next smaller batch size that all numbers of processes and pieces divide, or the least such."""
    unit = math.lcm(*processes, config.exact or 1) * (1 if config.exact else config.accumulate)
    unit = math.lcm(unit, config.samples.aug_repeats)
    return max(config.batch_size // unit, 1) * unit


def switched_off(run: Run, off: Sequence[str], lr: Sequence[Sequence[float]]) -> AbstractContextManager[object]:
    """Within, the run's steps go without these suspects; the run is spoilt for anything else."""
    if causes.AUGMENTATION in off:
        _use_plain_images(run)
    if causes.MIXING in off:
        run.train.mixing = None
    if causes.FLOAT64 in off:
        _widen_images(run)
    if causes.BATCH_NORM in off:
        _fix_statistics(run, torch.float64 if causes.FLOAT64 in off else None)
    if causes.LEARNING_RATE in off:
        _pin_rates(run, lr)
    if causes.ALIGNMENT in off:
        run.model.register_forward_pre_hook(lambda _, args: tuple(arg.clone() for arg in args))
    if causes.DROPOUT not in off:
        return nullcontext()
    run.step.draws = None  # keyed ones would not ask torch
    return ExpectedDraws()


def _use_plain_images(run: Run) -> None:
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
    layers = [layer for layer in batch_norms(run.model) if layer.training]
    for layer in layers:
        if layer.running_mean is None and layer.num_features:
            like = next(run.model.parameters()).new_zeros(layer.num_features)
            layer.running_mean, layer.running_var = like, torch.ones_like(like)
            layer.track_running_stats = True
        layer.momentum = 1.0
    images, _, ids = next(iter(run.train.read([(run.train.order.step(0, 0)[:_CALIBRATION], None)])))
    with ExpectedDraws():
        run.model(run.val.augment(images, ids, None).to(dtype))
    for layer in layers:
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
        torchs = getattr(func, "__wrapped__", func)  # draws/ puts methods of its own onto Tensor, around torch's
        if torchs not in _EXPECTED:
            return drawn
        parameters, expected = _EXPECTED[torchs]
        defaults = enumerate(parameters.items())
        given = [kwargs.get(name, args[i] if len(args) > i else default) for i, (name, default) in defaults]
        return drawn.copy_(torch.as_tensor(expected(*given), dtype=drawn.dtype))


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip
_TENSOR: Any = torch.Tensor.__base__  # where torch's own methods are, whatever stands on Tensor itself
# for each way to draw: the arguments that decide the expected value, with their defaults, and that value
_EXPECTED: dict[Any, tuple[dict[str, Any], Callable[..., Any]]] = {
    _TENSOR.bernoulli_: ({"self": None, "p": 0.5}, lambda _, p: p),
    _TENSOR.uniform_: ({"self": None, "from": 0.0, "to": 1.0}, lambda _, low, high: (low + high) / 2),
    _TENSOR.normal_: ({"self": None, "mean": 0.0}, lambda _, mean: mean),
    torch.bernoulli: ({"input": None}, lambda p: p),
    torch.rand: ({}, lambda: 0.5),
    torch.rand_like: ({}, lambda: 0.5),
    torch.randn: ({}, lambda: 0.0),
    torch.randn_like: ({}, lambda: 0.0),
}
