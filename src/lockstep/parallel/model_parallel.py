"""A model cut into stages over several devices, for one that a single device can't hold.

Its parts move to their devices, and a hook before each part brings its inputs after it. While one stage works the
others wait, so this buys memory and no speed; several processes, each with its own devices, share the batch by DDP.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.errors import UserError
from lockstep.parallel.fsdp import sequence
from lockstep.parallel.module_state import eval_mode

_PER_PARAMETER = 4  # tensors of its size: weight, gradient, and up to two of the optimizer


def cut(model: nn.Module, devices: Sequence[torch.device], example: Tensor, samples: int) -> list[list[nn.Module]]:
    """Put the parts of a model on `devices`, one run of parts on each, in the order in which a forward pass uses them.

    The runs are those whose largest memory is smallest: four tensors for each parameter, and what a forward pass of
    `samples` images leaves behind. The output comes back to the first device. Returns the parts by stage.

    Args:
        model: on the host; its forward takes one batch of images.
        example: images float [b, C, H, W] on the host, for one forward pass that finds the order and the sizes.
        samples: images per pass in training.

    Raises:
        UserError: where the model has fewer parts than there are devices.
    """
    parts, sizes = _used(model, example, samples)
    if len(parts) < len(devices):
        raise UserError(
            f"--model-parallel {len(devices)}: {type(model).__name__} can be cut into {len(parts)} part(s) at most",
            "Use fewer stages, or build the model of nn.Sequential blocks.",
        )
    ends = balanced(sizes, len(devices))
    stages = [parts[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    model.to(devices[0])  # what belongs to no part: parameters of the model's own, and parts that no pass uses
    for stage, device in zip(stages, devices, strict=True):
        for part in stage:
            part.to(device)
            part.register_forward_pre_hook(partial(_bring, device), with_kwargs=True)
    model.register_forward_hook(partial(_send_back, devices[0]))
    return stages


def balanced(sizes: Sequence[int], runs: int) -> list[int]:
    """The ends of `runs` non-empty runs of the sizes, such that the largest sum of a run is smallest."""
    totals = [0, *accumulate(sizes)]
    n = len(sizes)
    best = [(totals[end], [end]) for end in range(n + 1)]  # of the first `end` sizes in one run
    for run in range(2, runs + 1):
        best = [
            min(
                ((max(best[cut][0], totals[end] - totals[cut]), [*best[cut][1], end]) for cut in range(run - 1, end)),
                default=(totals[-1] + 1, []),
            )
            for end in range(n + 1)
        ]
    return best[n][1]


def _used(model: nn.Module, example: Tensor, samples: int) -> tuple[list[nn.Module], list[int]]:
    """The parts of a model in the order of their first use, and the bytes that each needs in training."""
    order: dict[nn.Module, int] = {}  # part -> bytes of what its layers put out

    def note(part: nn.Module, layer: nn.Module, args: Any, output: Any) -> None:
        del layer, args
        order.setdefault(part, 0)
        order[part] += sum(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor)) * samples // len(example)

    # in evaluation mode: a single image has no batch statistics, and leaves none
    with ExitStack() as hooks, eval_mode(model), torch.no_grad():
        for part in sequence(model):
            for layer in part.modules():
                if next(layer.children(), None) is None or layer is part:
                    hooks.enter_context(layer.register_forward_hook(partial(note, part)))
        model(example)
    weights = [_PER_PARAMETER * sum(p.nbytes for p in part.parameters()) for part in order]
    return list(order), [w + a for w, a in zip(weights, order.values(), strict=True)]


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda each: each.to(device, non_blocking=True) if isinstance(each, Tensor) else each, value)


def _bring(device: torch.device, part: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    del part
    return _moved((args, kwargs), device)


def _send_back(device: torch.device, model: nn.Module, args: Any, output: Any) -> Any:
    del model, args
    return _moved(output, device)
