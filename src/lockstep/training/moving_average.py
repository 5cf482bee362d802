"""The exponential moving average of the weights (EMA), for `--ema`."""

import torch
from torch import Tensor, nn

from lockstep.parallel.module_state import deep_copy


class Average(nn.Module):
    """`module` holds the exponential moving average of a model's parameters, and its newest buffers.

    With `warmup` the decay of update t is min(decay, (1 + t) / (10 + t)), t counted from 0, as in TensorFlow's
    tf.train.ExponentialMovingAverage(decay, num_updates): early weights are soon forgotten, however short the run. It
    is a function of the count, which checkpoints hold.

    Without it bits and names are those of torch's AveragedModel with get_ema_multi_avg_fn(decay), which copies its
    count to the device at each update, from memory that is not pinned: the host waits for every step under way.
    """

    n_averaged: Tensor  # int64 [], on the host

    def __init__(self, model: nn.Module, decay: float, warmup: bool = False) -> None:
        super().__init__()
        self.module, self.decay, self.warmup = deep_copy(model), decay, warmup
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move towards the model's weights; the first time, take them."""
        # an integer can't be trained, so the first copy of it is right for good
        averages, news = (
            [p.detach() for p in each.parameters() if p.is_floating_point() or p.is_complex()]
            for each in (self.module, model)
        )
        t = int(self.n_averaged)  # which is on the host
        if t > 0:
            decay = min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay
            torch._foreach_lerp_(averages, news, 1 - decay)
        else:
            for average, new in zip(averages, news, strict=True):
                average.copy_(new)
        for average, new in zip(self.module.buffers(), model.buffers(), strict=True):
            average.copy_(new)
        self.n_averaged += 1
