"""One optimizer step over a global batch: forward, backward, clip, update."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.loaders import Batch
from lockstep.data.pieces import Piece
from lockstep.draws.generators import piece_seed, reseeding
from lockstep.draws.intercept import keyed
from lockstep.draws.keyed import Draws
from lockstep.parallel.batchnorm import step_batch_norms
from lockstep.parallel.data_parallel import driven, is_compiled, replica_devices
from lockstep.parallel.modules import keep_gradients
from lockstep.parallel.norms import announced, end_step
from lockstep.parallel.sharded import is_sharded, local
from lockstep.parallel.strategy import sync_of, unwrap
from lockstep.parallel.sync import GradientSync
from lockstep.randomness import stream
from lockstep.training import checks, engine
from lockstep.training.losses import Loss, require_mean, terms_of
from lockstep.training.precision import autocast, scaler
from lockstep.training.skipping import Skipping, finite
from lockstep.training.stand_ins import StandIns

_NOTHING, _HOST = nullcontext(), torch.device("cpu")


class TrainStep:
    """`step(batch)` moves the weights by the global batch's gradient, whatever the number of ranks.

    Args:
        model: the module that `parallelize` returned, or any module in a world of one.
        loss: a function of (outputs, labels) that returns the mean over its samples, as torch's do, or each sample's
            loss, or a numerator and a denominator that are summed over the whole batch; or one of torch's loss modules,
            or its name. Class weights and ignored labels go with the module.
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
        loss: Loss | str,
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
        self.model, self.loss, self.optimizer = model, terms_of(loss), optimizer
        checks.require_ready(model, optimizer)
        self.clip_norm, self.schedule, self.seed = clip_norm, schedule, seed
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        device = next(model.parameters()).device
        self.sync: GradientSync = sync or sync_of(model)
        checks.require_sound(self.sync, precision, skip_nonfinite, find_unused_parameters, clip_norm)
        self.sync.bind(optimizer)
        self.autocast = autocast(precision, device, cache=not self.sync.exact)
        self.scaler = scaler(precision, device)
        # fp16 has no room for N: there the ranks' mean becomes their sum when it is float32 again
        self._averaged = 1 if self.scaler else self.sync.average_over
        self._divides: bool | None = None  # whether the loss has denominators: known after the first passes
        self._divisor: Tensor | None = None  # their mean over the batch's samples
        self._check_mean = True
        self._reseed = reseeding(driven(model))
        compiled = self._compiled = any(map(is_compiled, model.modules()))
        self._watched = driven(model) if compiled else []  # whose generators are looked at in the first pass
        self._replays = compiled and device.type != "cpu"  # perhaps: CUDA graphs are one of torch.compile's modes
        # DataParallel's copies run in threads of its own
        self.draws = None if replica_devices(model) else Draws(seed, compiled)
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # of the loss that a step returns
        self._scalars = engine.Scalars()
        self._piece_dtype = torch.float64 if torch.float64 in {p.dtype for p in self.parameters} else torch.float32
        self._norms = step_batch_norms(model)
        self._bare, self._sharded = unwrap(model), is_sharded(model)
        self._stand_ins = StandIns()
        self._check_gradients = not find_unused_parameters
        self.passes_write: bool | None = None  # whether forward or backward wrote into a parameter, in the first step
        self.withheld: list[nn.Parameter] = []  # whose gradients are not used, as those of layers trained later
        self.left_out = False  # the last step, because of a gradient that was not finite (`skip_nonfinite` alone)
        self._skipping = Skipping(skip_nonfinite, device)
        if schedule is not None:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])

    def __call__(self, batch: Batch) -> Tensor:
        """Take one step; returns this rank's summed loss, a scalar on the device (reading it waits for the device)."""
        if self.schedule is not None:
            factor = self.schedule(batch.samples)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        before = self._skipping.before(self.model)
        versions = [p._version for p in self.parameters] if self.passes_write is None else []
        found = self._accumulate(batch)
        if versions:
            self.passes_write = versions != [p._version for p in self.parameters]
        end_step(self._norms, batch.count, self.sync.average_over)
        if self._check_gradients and batch.pieces:
            self._check_gradients = False
            checks.require_gradients(self.model, [p for p in self.parameters if not self.sync.received(p)])
        self.sync.finish()
        for parameter in self.withheld:
            parameter.grad = None
        summed = self._summed(found, batch)
        self._divide()
        self.left_out = self._skipping.undone(before, self.parameters)
        if self.left_out and self.scaler is None:
            self._skipping.count += 1
        else:  # fp16's scaler leaves the step out as well, and lowers its scale
            self._update(batch.step)
        for parameter in self.parameters:  # a fortieth of the time of optimizer.zero_grad, which does the same
            parameter.grad = None
        self.sync.updated(batch.step)
        return summed

    @property
    def skipped(self) -> int:
        """Steps left out because a gradient was not finite, the scaler's of fp16 among them; waits for the device."""
        return int(self._skipping.count)

    def _divide(self) -> None:
        """What could not be done before the gradients' sum: multiply by N for fp16, divide by a denominator."""
        factor: Any = self.sync.average_over / self._averaged
        if self._divisor is not None:
            factor = factor / self._divisor
        elif factor == 1:
            return
        for parameter in self.parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)

    def _update(self, step: int) -> None:
        draws = engine.may_draw(self.optimizer)
        if draws:  # the same on every rank
            for seed in (torch.default_generator.manual_seed, self._reseed):
                seed(stream(self.seed, "update", step))
        if self.scaler is None:
            self._clip()
            self.optimizer.step() if draws else engine.update(self.optimizer)
        else:
            # after the all-reduce an overflow of one rank is in every rank's gradients, so all skip the same step
            self.scaler.unscale_(self.optimizer)
            self._skipping.count += ~finite(self.parameters)
            self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _accumulate(self, batch: Batch) -> list[Tensor]:
        """What `_pass` returns of each of this rank's pieces."""
        sizes = [piece.size for piece in batch.pieces]
        images, labels = self.sync.cut(batch.images, sizes), self.sync.cut(batch.labels, sizes)

        def reseed(i: int) -> int:
            self._reseed(seed := piece_seed(self.seed, batch.step, batch.pieces[i].key))
            return seed

        def take(model: nn.Module, i: int) -> Tensor:
            piece = batch.pieces[i]
            some, theirs = images[i], labels[i]
            if not (sizes[i] and self._stand_ins.complete):
                some, theirs = self._stand_ins.filled(some, theirs)
            if self.draws is None:
                return self._pass(model, some, theirs, piece, batch.count)
            ids = batch.ids[piece.rows] if sizes[i] else np.zeros(len(some), np.int64)
            bare = self._bare if model is self.model else unwrap(model)
            with keyed(self.draws, bare, batch.step, ids, some):
                if self._sharded and self.draws.plan is None:  # it can't be passed through in the midst of a pass
                    with self.autocast():
                        checks.require_planned(self.draws, model, some)
                return self._pass(model, some, theirs, piece, batch.count)

        def take_and_keep(model: nn.Module, i: int) -> Tensor:
            watched, self._watched = self._watched, []
            with checks.told_of_draws(self.model, watched):
                found = take(model, i)
            if self._replays and i < len(sizes) - 1:
                keep_gradients(self.parameters)
            return found

        # what watches a compiled model would cost any other one microseconds
        return self.sync.passes(self.model, sizes, reseed, take_and_keep if self._compiled else take)

    def _summed(self, found: list[Tensor], batch: Batch) -> Tensor:
        """This rank's summed loss. One with denominators: numerators / the mean denominator of the batch's samples,
        which its gradients are divided by too; a small all-reduce, that nothing waits for."""
        if self._divides is None:
            self._divides = self.sync.anywhere(any(each.ndim for each in found))
        if len(found) == 1 and not self._divides:
            return found[0] * self._count(batch.pieces[0].size)
        sizes = [piece.size for piece in batch.pieces]
        if not self._divides:
            losses = [mean * self._count(size) for mean, size in zip(found, sizes, strict=True)]
            return sum(losses[1:], losses[0]) if losses else batch.images.new_zeros((), dtype=self._dtype)
        terms = torch.stack(found) if found else batch.images.new_zeros(0, 2, dtype=self._dtype)
        self._divisor = self.sync.total(terms[:, 1], sum(sizes), batch.count) / batch.count
        # rounded piece by piece, as means over pieces are: float64 adds such numbers without a loss, in any order
        return (terms[:, 0] / self._divisor).to(self._piece_dtype).to(self._dtype).sum()

    def _count(self, size: int) -> Tensor:
        """A number of samples on the host, which costs a device nothing to multiply by.

        Float64 where the device has it, so that the sum of the losses does not tell how many pieces it came in.
        """
        return self._scalars[size, self._dtype, _HOST]

    def _pass(self, model: nn.Module, images: Tensor, labels: Tensor, piece: Piece, count: int) -> Tensor:
        """Forward and backward of one piece of a batch of `count`.

        Returns its mean loss, detached, or where it has a denominator both of them, [2].
        """
        with announced(self._norms, piece, len(images), count) if self._norms else _NOTHING:
            with self.autocast():
                outputs = checks.outputs_of(model, images)
                value, denominator = self.loss(outputs, labels)
                if self._check_mean and 1 < piece.size < count:  # once, where a batch is cut at all
                    self._check_mean = False
                    require_mean(self.loss, outputs.detach() if isinstance(outputs, Tensor) else outputs, labels)
            samples = piece.size if denominator is None else min(piece.size, 1)  # none: zeros, for who waits for them
            loss = value if self.scaler is None else self.scaler.scale(value)
            engine.backward(loss, self._scalars[samples * self._averaged / count, loss.dtype, loss.device])
        value = value.detach()
        if denominator is not None:
            value = torch.stack([value.to(self._dtype), denominator.to(self._dtype)])
        return value if piece.size else torch.zeros_like(value)

    def _clip(self) -> None:
        if self.clip_norm:
            self.sync.clip(self.parameters, self.clip_norm)
