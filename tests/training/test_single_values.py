"""A batch norm that will meet a single value is refused before the first step, not after hours."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.config import Config
from lockstep.data.image_sets import ArraySet
from lockstep.data.order import Order
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import refuse_single_values

TWO = World(0, 2, 0, 2, torch.device("cpu"), "none")  # nobody is asked


@pytest.mark.parametrize(
    ("config", "samples", "refused"),
    [
        (Config(batch_size=12, exact=6), 40, True),  # the last batch has 4: a slice for each
        (Config(batch_size=12, exact=6), 36, False),
        (Config(batch_size=12, exact=12), 36, True),
        (Config(batch_size=12), 38, True),  # the last one has 2: one for each of two ranks
        (Config(batch_size=12), 39, True),
        (Config(batch_size=12), 40, False),
        (Config(batch_size=12, accumulate=6), 36, True),
        (Config(batch_size=12, accumulate=3), 36, False),
    ],
)
def test_a_batch_norm_that_will_meet_a_single_value_is_refused_before_the_first_step(
    config: Config, samples: int, refused: bool
) -> None:
    pixels = np.zeros((samples, 1, 4, 4), np.uint8)
    images = ArraySet("small", ("a", "b"), (0.5,), (0.2,), (pixels,), np.arange(samples) % 2, "small")
    mapped = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2), nn.BatchNorm1d(2))
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.BatchNorm1d(2).eval())
    for model, raises in ((mapped, refused), (mapped[:2], False), (frozen, False)):
        train: Any = SimpleNamespace(images=images, order=Order(samples, config.batch_size, 0))
        run: Any = SimpleNamespace(model=model, train=train)
        if raises:
            with pytest.raises(UserError, match=r"batch norm 4 sees one value of each channel, and in a batch of"):
                refuse_single_values(config, TWO, run)
        else:
            refuse_single_values(config, TWO, run)
