"""What a step can't be taken with, said by name before or in the first one."""

import typing
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.config import Config, ModelConfig, OptimConfig, Precision, Recovery
from lockstep.draws.keyed import Draws, NotPlanned
from lockstep.errors import UserError
from lockstep.parallel.strategy import unwrap
from lockstep.parallel.sync import GradientSync


def require_ready(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what no step can be taken with."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            "LBFGS evaluates the loss several times in a step, and a step here is one pass over the batch",
            "Use an optimizer that steps by the gradient at hand, as SGD or AdamW.",
        )
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise UserError(
            f"parameters without a shape yet: {', '.join(lazy[:5])}",
            "Pass a batch through the Lazy modules before anything else is made of the model.",
        )


def require_sound(sync: GradientSync, precision: str, skip: bool, unused: bool, clip_norm: float) -> None:
    """Raise UserError for a step whose settings don't go together, in the words of the command line."""
    Config(
        precision=typing.cast(Precision, precision),
        on_nonfinite="skip" if skip else "stop",
        model=ModelConfig(find_unused_parameters=unused),
        optim=OptimConfig(clip_norm=clip_norm),
        link=sync.link,
        recovery=Recovery(checkpoint_every="0"),
    )


def require_planned(draws: Draws, model: nn.Module, images: Tensor) -> None:
    """Find where the batch is in what a sharded model draws, or raise UserError."""
    try:
        draws.planned(model, images)
    except NotPlanned as refused:
        raise UserError(
            f"{type(model).__name__} takes no pass of {refused}, by which its draws are keyed",
            "Use --strategy ddp, which keys them by a guess then.",
        ) from refused


def outputs_of(model: nn.Module, images: Tensor) -> Any:
    """The model's outputs; raises UserError where batch norm has nothing to take statistics of."""
    try:
        return model(images)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            f"batch norm has a single value for a channel, which has no spread: {error}",
            "Leave the short last batch out by --drop-last, or choose another --batch-size.",
        ) from error


def require_gradients(model: nn.Module, without: Sequence[Tensor]) -> None:
    """Name the parameters that took no part in a step, which DDP would report by number, a step later."""
    named = {id(p): name for name, p in unwrap(model).named_parameters()}
    unused = [named.get(id(p), "?") for p in without if p.requires_grad]
    if unused:
        raise UserError(
            f"{len(unused)} parameter(s) took no part in the loss: {', '.join(unused[:5])}",
            "Use them in forward(), freeze them with requires_grad_(False), or pass --find-unused-parameters.",
        )


@contextmanager
def told_of_draws(model: nn.Module, devices: Sequence[torch.device]) -> Iterator[None]:
    """Around a pass: warn where something was drawn from a generator of torch's, and so is keyed by no sample.

    In code that torch.compile made nobody can take the place of a tensor's method. Without devices nothing is done.
    """
    before = _generators(devices)
    yield
    if _generators(devices) != before:
        warnings.warn(
            f"{type(unwrap(model)).__name__} is compiled and draws random numbers that are not keyed by sample, so "
            "results depend on the number of processes: use torch.bernoulli(x) for x.bernoulli_(), torch.rand_like and "
            "torch.randn_like for x.uniform_() and x.normal_()",
            stacklevel=2,
        )


def _generators(devices: Sequence[torch.device]) -> list[bytes]:
    """The states of the generators that passes on these devices draw from."""
    states = [torch.default_generator.get_state()] if devices else []
    states += [torch.get_device_module(d).get_rng_state(d) for d in devices if d.type != "cpu"]
    return [state.numpy().tobytes() for state in states]
