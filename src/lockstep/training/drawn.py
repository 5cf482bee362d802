"""What forward draws, in a pass that is not TrainStep's: keyed as it would key it, so that it can be drawn again."""

from contextlib import AbstractContextManager

import numpy as np
from torch import Tensor, nn

from lockstep.draws.intercept import keyed
from lockstep.draws.keyed import Draws


def draws_of(seed: int) -> Draws:
    """The draws of a run; `draws.plan` is None until something is drawn."""
    return Draws(seed)


def drawn(draws: Draws, model: nn.Module, step: int, ids: np.ndarray, images: Tensor) -> AbstractContextManager[None]:
    """Around a forward pass of the bare model in step `step`; `ids`: int64 [b], the samples of images [b, ...]."""
    return keyed(draws, model, step, ids, images)
