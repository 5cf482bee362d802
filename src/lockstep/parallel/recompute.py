"""Activation checkpointing: a block keeps what came in, and computes its insides again in the backward pass.

Chen et al., "Training deep nets with sublinear memory cost", 2016, by torch's non-reentrant checkpoint. A forward pass
more for a block's insides less. The second pass draws what the first one drew, and leaves no trace: torch's own would
move batch norm's running statistics twice.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UserError
from lockstep.parallel.units import units
from lockstep.parallel.untouched import untouched


def checkpoint_activations(model: nn.Module) -> None:
    """Let each block of a model (`units`) compute again, in place: a block changes its class, and nothing else.

    Raises:
        UserError: for a model without blocks.
    """
    blocks = units(model)
    if not blocks:
        raise UserError(
            f"--activation-checkpointing: {type(model).__name__} has no blocks to compute again",
            "Build it of blocks in an nn.Sequential or nn.ModuleList, or leave the flag out.",
        )
    for block in blocks:
        block.__class__ = _recomputed(type(block))  # type: ignore[arg-type]  # classes have hashes


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        return checkpoint(own, *args, use_reentrant=False, context_fn=partial(_contexts, self), **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the first pass and of the second."""
    return nullcontext(), untouched(block)
