"""One optimizer step over a global batch: forward, backward, clip, update."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.loaders import Batch
from lockstep.data.pieces import Piece
from lockstep.draws.intercept import keyed
from lockstep.draws.keyed import Draws
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import step_batch_norms
from lockstep.parallel.data_parallel import driven, replica_devices
from lockstep.parallel.modules import Kept
from lockstep.parallel.norms import announced, end_step
from lockstep.parallel.sharded import is_sharded, whole
from lockstep.parallel.strategy import sync_of, unwrap
from lockstep.parallel.sync import GradientSync
from lockstep.randomness import stream
from lockstep.training.precision import autocast, scaler

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [b, ...], labels [b]) -> the mean over the b samples


class TrainStep:
    """`step(batch)` moves the weights by the global batch's gradient, whatever the number of ranks.

    Args:
        model: the module that `parallelize` returned, or any module in a world of one.
        loss: the mean loss of its samples, as torch's loss functions compute it.
        optimizer: any torch optimizer over the model's parameters.
        precision: "fp32", "tf32", "bf16" or "fp16"; the last two through autocast, fp16 with a gradient scaler.
        clip_norm: largest global gradient norm (0: no clipping).
        schedule: learning-rate factor, a function of the samples seen before the step; multiplies each group's initial
            rate.
        seed: key of dropout and of whatever else the model draws.
        sync: how gradients are combined (default: as `parallelize` made `model`).
        find_unused_parameters: accept parameters without a gradient.
        skip_nonfinite: leave weights and buffers as they are where a gradient is not finite, on all ranks alike. It
            costs a wait for the device on every step.

    A rank's loss is its samples' sum divided by the global batch's true count, times N because DDP averages; so uneven
    shares and a short last batch weigh every sample alike.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str = "fp32",
        clip_norm: float = 0.0,
        schedule: Callable[[int], float] | None = None,
        seed: int = 0,
        sync: GradientSync | None = None,
        find_unused_parameters: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.clip_norm, self.schedule, self.seed = clip_norm, schedule, seed
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        device = next(model.parameters()).device
        self.sync: GradientSync = sync or sync_of(model)
        self.sync.bind(optimizer)
        self.autocast = autocast(precision, device, cache=not self.sync.exact)
        self.scaler = scaler(precision, device)
        self._reseed = _reseed(driven(model))
        self.draws = None if replica_devices(model) else Draws(seed)  # DataParallel's copies run in threads of its own
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # of the loss that a step returns
        self._counts: dict[int, Tensor] = {}
        self._norms = step_batch_norms(model)
        self._example: tuple[Tensor, Tensor] | None = None  # of images and labels, for steps without a sample
        self._check_gradients = not find_unused_parameters
        self._skip_nonfinite = skip_nonfinite
        self.skipped = 0  # steps left out because of a gradient that was not finite
        if schedule is not None:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])

    def __call__(self, batch: Batch) -> Tensor:
        """Take one step; returns this rank's summed loss, a scalar on the device (reading it waits for the device)."""
        if self.schedule is not None:
            factor = self.schedule(batch.samples)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        before = Kept(self.model.modules()) if self._skip_nonfinite else None
        summed = self._accumulate(batch)
        end_step(self._norms, batch.count, self.sync.average_over)
        if self._check_gradients and batch.pieces:
            self._require_gradients()
        self.sync.finish()
        if before is not None and not self._finite():
            self.skipped += 1
            before.restore()
        else:
            self._update()
        for parameter in self.parameters:  # a fortieth of the time of optimizer.zero_grad, which does the same
            parameter.grad = None
        self.sync.updated(batch.step)
        return summed

    def _finite(self) -> bool:
        """The same on all ranks: gradients are, after their reduction."""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        return bool(torch.isfinite(whole(norm)))

    def _update(self) -> None:
        if self.scaler is None:
            self._clip()
            self.optimizer.step()
        else:
            # after the all-reduce an overflow of one rank is in every rank's gradients, so all skip the same step
            self.scaler.unscale_(self.optimizer)
            self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _accumulate(self, batch: Batch) -> Tensor:
        sizes = [piece.size for piece in batch.pieces]
        images, labels = self.sync.cut(batch.images, sizes), self.sync.cut(batch.labels, sizes)

        def reseed(i: int) -> int:
            self._reseed(seed := stream(self.seed, "dropout", batch.step, batch.pieces[i].key))
            return seed

        def take(model: nn.Module, i: int) -> Tensor:
            weight, piece = sizes[i] * self.sync.average_over / batch.count, batch.pieces[i]
            some, theirs = self._some(images[i], labels[i])
            if self.draws is None:
                return self._pass(model, some, theirs, weight, piece, batch.count)
            ids = batch.ids[piece.rows] if sizes[i] else np.zeros(len(some), np.int64)
            with keyed(self.draws, unwrap(model), batch.step, ids, some):
                if self.draws.plan is None and is_sharded(model):  # it can't be passed through in the midst of a pass
                    self.draws.planned(model, some)
                return self._pass(model, some, theirs, weight, piece, batch.count)

        means = self.sync.passes(self.model, sizes, reseed, take)
        losses = [mean * self._count(size) for mean, size in zip(means, sizes, strict=True)]
        return sum(losses[1:], losses[0]) if losses else batch.images.new_zeros((), dtype=self._dtype)

    def _count(self, size: int) -> Tensor:
        """A number of samples as a kept scalar on the host, which costs a device nothing to multiply by.

        Float64 where the device has it, so that the sum of the losses does not tell how many pieces it came in.
        """
        found = self._counts.get(size)
        if found is None:
            found = self._counts[size] = torch.tensor(size, dtype=self._dtype)
        return found

    def _pass(
        self, model: nn.Module, images: Tensor, labels: Tensor, weight: float, piece: Piece, count: int
    ) -> Tensor:
        """Forward and backward of one piece of a batch of `count`; returns its mean loss, detached."""
        with self.autocast(), announced(self._norms, piece, len(images), count):
            mean = self.loss(_outputs(model, images), labels)
        weighted = mean if weight == 1 else mean * weight
        (weighted if self.scaler is None else self.scaler.scale(weighted)).backward()  # type: ignore[no-untyped-call]
        return mean.detach() if weight else torch.zeros_like(mean)

    def _some(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The same; for no sample, as the other ranks' collectives wait, two of an earlier step.

        Not blank ones: a model may divide by its input's spread. And not one, which has no batch statistics.
        """
        if len(images):
            if self._example is None or len(self._example[0]) < min(2, len(images)):
                self._example = images[:2].clone(), labels[:2].clone()
            return images, labels
        if self._example is None:
            ramp = torch.linspace(-1, 1, 2 * images[:0].new_empty(images.shape[1:]).numel(), device=images.device)
            self._example = ramp.view(2, *images.shape[1:]).to(images.dtype), labels.new_zeros(2, *labels.shape[1:])
        images, labels = self._example
        return (images, labels) if len(images) > 1 else (images.repeat_interleave(2, 0), labels.repeat_interleave(2, 0))

    def _clip(self) -> None:
        if self.clip_norm:
            self.sync.clip(self.parameters, self.clip_norm)

    def _require_gradients(self) -> None:
        """On the first step: name the parameters that took no part, which DDP would report by number, a step later."""
        self._check_gradients = False
        named = {id(p): name for name, p in unwrap(self.model).named_parameters()}
        unused = [named.get(id(p), "?") for p in self.parameters if p.requires_grad and not self.sync.received(p)]
        if unused:
            raise UserError(
                f"{len(unused)} parameter(s) took no part in the loss: {', '.join(unused[:5])}",
                "Use them in forward(), freeze them with requires_grad_(False), or pass --find-unused-parameters.",
            )


def _outputs(model: nn.Module, images: Tensor) -> Any:
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


def _reseed(devices: Sequence[torch.device]) -> Callable[[int], object]:
    """A function that seeds the generators which dropout on `devices` draws from; microseconds, no synchronisation.

    The first is the current device. Each of several has masks of its own.
    """
    if devices[0].type == "cpu":
        return torch.default_generator.manual_seed
    seed_current: Callable[[int], object] = torch.get_device_module(devices[0]).manual_seed

    def seed_all(seed: int) -> None:
        seed_current(seed)
        for number, device in enumerate(devices[1:], 1):
            with torch.accelerator.device_index(device.index):
                seed_current(stream(seed, "device", number))

    return seed_all if len(devices) > 1 else seed_current
