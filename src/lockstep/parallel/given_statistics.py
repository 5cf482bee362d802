"""Batch normalisation of a part of a batch by the statistics of the whole, in both directions.

What the layers saw and got back in a pass over the whole batch is noted, call by call; a pass over a part computes
with it.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.parallel.batchnorm import (
    GroupBatchNorm,
    Normalise,
    SyncBatchNorm,
    channels,
    own_forward,
    statistics,
)
from lockstep.parallel.module_state import replaced


@dataclass
class Call:
    """What one call of a layer saw and got back, over `count` values of a channel."""

    mean: Tensor  # [C]
    variance: Tensor  # [C]
    r: Tensor  # [C], 1 / deviation
    count: Tensor  # []
    sums: Tensor  # [2, C], of what came back
    momentum: float | None  # of the running statistics; None: their average, or unknown

    @classmethod
    def of(cls, x: Tensor, y: Tensor, eps: float, momentum: float) -> "Call":
        """Of a call that took x to y; backward will add the rest."""
        with torch.no_grad():
            mean, squares = statistics(x)
            count = torch.tensor(float(x.numel() // x.shape[1]), dtype=mean.dtype, device=x.device)
            variance = squares / count
            made = cls(mean, variance, torch.rsqrt(variance + eps), count, mean.new_zeros(2, len(mean)), momentum)
        held = [x.detach()]  # which is kept until backward anyway

        def note(gradients: tuple[Tensor, ...]) -> None:
            if held:
                dims, shape = channels(x)
                centred = held.pop().to(mean.dtype) - mean.view(shape)
                dy = gradients[0].to(mean.dtype)
                made.sums = torch.stack([dy.sum(dims), (dy * centred).sum(dims)])

        if y.grad_fn is not None:
            y.grad_fn.register_prehook(note)  # after the hooks on y, which may change what comes back
        return made


class GivenStatistics:
    """The calls of a model's batch norms, pass by pass. What computes by a forward of its own is not among them."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = {
            id(layer): path
            for path, layer in model.named_modules()
            if isinstance(layer, _BatchNorm)
            and (isinstance(layer, SyncBatchNorm) or not (isinstance(layer, GroupBatchNorm) or own_forward(layer)))
        }
        self.passes: list[list[Call]] = []
        self.others = False  # the last part had not as many calls as the whole
        self.momenta: dict[str, float] = {}  # of layers whose momentum was another one for a part: relative differences

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within, passes are noted; each begins by `begin`."""

        def note(
            normalised: Callable[[], Tensor], x: Tensor, eps: float, _: Any, __: Any, momentum: Any, ___: str
        ) -> Tensor:
            self.passes[-1].append(Call.of(x, y := normalised(), eps, momentum))
            return y

        with self._instead(note), replaced(SyncBatchNorm, watcher=self):
            yield

    def of_all_ranks(self, mean: Tensor, variance: Tensor, r: Tensor, count: Tensor, momentum: float | None) -> Call:
        """Of a SyncBatchNorm, which sets `sums` in backward."""
        self.passes[-1].append(call := Call(mean, variance, r, count, mean.new_zeros(2, len(mean)), momentum))
        return call

    def begin(self) -> None:
        """Before a pass that is noted."""
        self.passes.append([])

    @contextmanager
    def given(self, number: int, moved_by: float = 0.0) -> Iterator[None]:
        """Within, a part of the batch of pass `number` is normalised by the whole; running statistics stay.

        `moved_by`: a part of the means, which other processes round otherwise.
        """
        calls, rest = iter(self.passes[number]), object()
        self.others = False

        def give(
            normalised: Callable[[], Tensor], x: Tensor, eps: float, weight: Any, bias: Any, momentum: Any, path: str
        ) -> Tensor:
            call = next(calls, None)
            self.others |= call is None
            if call is None:
                return normalised()
            if None not in (momentum, call.momentum) and momentum != call.momentum:
                self.momenta[path] = abs(momentum / call.momentum - 1) if call.momentum else math.inf
            seen = call.mean * (1 + moved_by), call.variance, call.r, call.count
            y: Tensor = Normalise.apply(x, weight, bias, *seen, eps, None, False, call)
            return y

        with self._instead(give):
            yield
        self.others |= next(calls, rest) is not rest

    def _instead(self, take: Callable[..., Tensor]) -> AbstractContextManager[None]:
        """Within, `take` has the calls of F.batch_norm by the layers in training."""
        torchs = F.batch_norm

        def batch_norm(
            input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
            training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
        ) -> Tensor:  # fmt: skip
            normalised = partial(torchs, input, running_mean, running_var, weight, bias, training, momentum, eps)
            frame = inspect.currentframe()
            caller = frame.f_back.f_locals.get("self") if training and frame is not None and frame.f_back else None
            if id(caller) not in self.layers:
                return normalised()
            factor = None if running_mean is None else momentum
            return take(normalised, input, eps, weight, bias, factor, self.layers[id(caller)])

        return replaced(F, batch_norm=batch_norm)
