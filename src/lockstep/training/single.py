"""Before the first step: will batch norm meet a single value for a channel, which has no spread?

That is so where a layer sees a 1x1 map and one sample passes by itself, mostly in the short last batch of an epoch: an
error of torch's, after hours.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.data.augment import Augment
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import SyncBatchNorm, local_batch_norms
from lockstep.parallel.modules import eval_mode
from lockstep.parallel.sharded import is_sharded
from lockstep.processes.world import World
from lockstep.training.assemble import Run


def refuse_single_values(config: Config, world: World, run: Run) -> None:
    """Raise UserError where some batch of the run would give batch norm one value; rank 0 looks."""
    order = run.train.order
    rest = order.samples_per_epoch % order.batch_size
    counts = ([order.batch_size] if order.samples_per_epoch >= order.batch_size else []) + ([rest] if rest else [])
    for count in counts:
        pieces = min(config.exact or config.accumulate, count)
        together = {count // pieces, -(-count // pieces)}  # samples of a micro-batch, or of a slice
        shares = together if config.exact else {n for all_ in together for n in _shares(all_, world.size)}
        layers: list[nn.Module] = list(local_batch_norms(run.model)) if 1 in shares else []
        layers += [m for m in run.model.modules() if isinstance(m, SyncBatchNorm)] if 1 in together else []
        layers = [layer for layer in layers if layer.training]
        if layers and not world.rank and not is_sharded(run.model):
            _refuse(config, run, layers, count)


def _shares(samples: int, ranks: int) -> set[int]:
    """How many of so many samples a rank may have; sizes differ by one at most."""
    return {samples // ranks, -(-samples // ranks)}


def _refuse(config: Config, run: Run, layers: list[nn.Module], count: int) -> None:
    seen: dict[nn.Module, int] = {}

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0]
        seen[layer] = x.numel() // x.shape[1]

    images = run.train.images
    pixels, _ = images.read(np.zeros(1, np.int64), None)
    one = Augment(images.mean, images.std, image_size=config.data.train_side)(pixels, torch.zeros(1).long(), None)
    like = next(run.model.parameters())
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with eval_mode(run.model), torch.no_grad():
            run.model(one.to(like.device, like.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    names = [name for name, module in run.model.named_modules() if seen.get(module) == 1]
    if names:
        raise UserError(
            f"batch norm {names[0]} sees one value of each channel, and in a batch of {count} one sample passes by "
            "itself: a single value has no spread",
            "Leave the short last batch out by --drop-last, or choose another --batch-size or fewer slices.",
        )
