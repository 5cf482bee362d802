"""One optimizer step over a global batch: forward, backward, clip, update.

Backward and update do without the Python that torch puts around them, a quarter of a tiny step's time, where nobody
would notice; torch's own functions are called where somebody would: a profiler, a hook, a tensor of a class of its own.
"""

import inspect
import traceback
import typing
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint.restore import STEPS
from lockstep.config import Config, ModelConfig, OptimConfig, Precision, Recovery
from lockstep.config.execution import Law
from lockstep.data.loaders import Batch
from lockstep.data.order import Shard
from lockstep.distributed.failures import at_a_limit, is_peer_loss, last_line
from lockstep.errors import UserError, reason
from lockstep.parallel.batchnorm import announced, end_step, step_batch_norms
from lockstep.parallel.fsdp import LOW, is_sharded, local, whole
from lockstep.parallel.hidden_state import HiddenState, put_back
from lockstep.parallel.module_state import Kept, driven, is_compiled
from lockstep.parallel.parameter_hooks import hooks_of, step_hooks
from lockstep.parallel.strategy import require_trainable, sync_of, unwrap
from lockstep.parallel.sync import GradientSync
from lockstep.randomness import stream
from lockstep.rng.draws import Draws, NotPlanned
from lockstep.rng.generators import HostGenerators, pass_seed, seed_host, seeding
from lockstep.rng.intercept import keyed
from lockstep.training.losses import Loss, RankLoss, require_mean, terms_of
from lockstep.training.precision import autocast, scaler
from lockstep.training.self_check import SelfCheck, is_checked


@cache
def scalar(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a scalar that is kept: a new one costs microseconds, and a copy to its device."""
    return torch.full((), number, dtype=dtype, device=device)


def times(mean: Tensor, samples: int) -> Tensor:
    """Their product in float64, so that a sum does not tell how many shards it came in: one operator, as of two scalars
    the wider type counts, and none that a device waits for, as the number is the host's."""
    return mean * scalar(samples, torch.float64, _HOST)


def backward(loss: Tensor, weight: Tensor) -> None:
    """`loss.backward(weight)` for scalars: gradients of loss * weight, without that product.

    A copy of `weight` is taken: a parameter's gradient may be a view of it.
    """
    if type(loss) is Tensor:
        torch.autograd._engine_run_backward(  # type: ignore[attr-defined]
            (loss,), (weight.clone(),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        loss.backward(weight.clone())  # type: ignore[no-untyped-call]


def may_draw(optimizer: Any) -> bool:
    """Whether an update may draw noise: torch's optimizers by themselves don't, and seeding costs 4 us or more."""
    plain = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    return not plain or any(step_hooks(optimizer))


def update(optimizer: Any) -> None:
    """`optimizer.step()` for one that has no hooks and draws nothing, visible to a profiler where there is one."""
    step = type(optimizer).step
    if getattr(step, "hooked", False) and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        step.__wrapped__(optimizer)
    else:
        optimizer.step()


def finite(parameters: Iterable[nn.Parameter]) -> Tensor:
    """bool []: whether all gradients are; by their norm, which takes a few kernels."""
    return torch.isfinite(whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])))


def require_ready(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what no step can be taken with."""
    own = {id(p) for p in model.parameters()}
    others = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if others:
        raise UserError(
            f"{others} parameter(s) of the optimizer are not the model's: nobody adds up their gradients",
            "Make them part of the model, as a module around it; build the optimizer after parallelize(..., 'fsdp').",
        )
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in arguments):
        raise needs_closure(optimizer)
    require_trainable(model)


def needs_closure(optimizer: torch.optim.Optimizer) -> UserError:
    """The refusal of one as LBFGS or SAM."""
    return UserError(
        f"{type(optimizer).__name__} evaluates the loss several times in a step, and a step here is one pass over "
        "the batch",
        "Use an optimizer that steps by the gradient at hand, as SGD or AdamW.",
    )


def require_sound(sync: GradientSync, precision: str, skip: bool, clip_norm: float, whole_batch: bool) -> None:
    """Raise UserError for a step whose settings don't go together, in the words of the command line."""
    if whole_batch and sync.exact:
        raise UserError(
            "whole_batch=True in exact mode: no loss can see all outputs of a batch there",
            "Leave one of the two out.",
        )
    Config(
        precision=typing.cast(Precision, precision),
        on_nonfinite="skip" if skip else "stop",
        model=ModelConfig(find_unused_parameters=sync.skips_unused),
        optim=OptimConfig(clip_norm=clip_norm),
        comm=sync.link,
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


def refusal_of(error: Exception, shard: Shard, count: int, alone: bool) -> UserError | None:
    """The sentence for an error of a pass that comes of how few samples a shard has, or where a step is taken, or None.

    `count`: samples of the global batch. `alone`: no other process takes part in the pass. Else a RuntimeError may be
    that of a collective.
    """
    if "once_differentiable" in str(error):  # a gradient's gradient through batch norm, whatever the samples
        return None
    if "does not require grad" in str(error) and not torch.is_grad_enabled():
        return UserError("no loss has a gradient under torch.no_grad()", "Take the step outside of it.")
    others = (UserError, torch.OutOfMemoryError) if alone else (UserError, RuntimeError)
    single = isinstance(error, ValueError) and "more than 1 value per channel" in str(error)
    if shard.size == 1 < (shard.members if single else count) and not isinstance(error, others):
        return UserError(
            f"the model takes no single sample, which a part of a short batch may be: {last_line(error)}",
            "Take the whole batch's statistics: nn.BatchNorm in place of torch.nn.functional's, no --batch-norm local."
            if single
            else "Keep the batch dimension in forward, by flatten(1) or squeeze(-1), or see that each part has two: "
            "by --drop-last and a larger --batch-size. Then --law off tries none beforehand.",
        )
    if single:
        return UserError(
            "batch norm has a single value for a channel, which has no spread",
            "Leave the short last batch out by --drop-last, or choose another --batch-size, or other SAMPLES of "
            "--batch-norm groups:SAMPLES.",
        )
    return None


def misfit_of(error: Exception, step: int, ids: np.ndarray, model: nn.Module) -> UserError | None:
    """The sentence for a layer or loss that does not take a batch, by what the failed pass held: no step waits."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, (IndexError, RuntimeError, ValueError)):
        return None
    if is_peer_loss(error) or "CUDA" in str(error):
        return at_a_limit(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    held: dict[str, Any] = next((f.f_locals for f in frames if f.f_code is TrainStep._pass.__code__), {"value": 0})
    in_torch = "/torch/nn/" in (file := frames[-1].f_code.co_filename) and "/parallel/" not in file
    if "value" in held or not (in_torch or isinstance(error, RuntimeError)):
        return None
    images, labels, outputs, weight = held["images"], held["labels"], held.get("outputs"), next(model.parameters())
    if outputs is None:
        unlike = images.dtype != weight.dtype or images.device != weight.device
        if not in_torch and not (unlike and images.dtype != torch.int64):
            return None
        frame, layer = next((f, m) for f in reversed(frames) if isinstance(m := f.f_locals.get("self"), nn.Module))
        name = next((f"{name}, " for name, each in model.named_modules() if each is layer and name), "")
        given = next((each for each in [*frame.f_locals.values()][1:] if isinstance(each, Tensor)), images)
        kind, weight = "images " * (given is images) + kind_of(given), next(layer.parameters(), weight)
        what = f"{name}{type(layer).__name__}({layer.extra_repr()}) does not take {kind}"
        remedy = f"Build it for these, or convert them: its weights are {weight.dtype} on {weight.device}."
    else:
        what = f"the loss does not take labels {kind_of(labels)} for outputs {kind_of(outputs)}"
        remedy = "Cross-entropy takes class numbers, int64 [b], or a probability of each class, float [b, classes]."
        numbers = labels.shape == ids.shape and not labels.is_floating_point()
        if isinstance(outputs, Tensor) and numbers and labels.device == outputs.device:
            wide, known = outputs.shape[-1], labels != nn.CrossEntropyLoss().ignore_index
            if wrong := (known & ((labels < 0) | (labels >= wide))).nonzero().flatten().tolist():
                what = f"sample {ids[wrong[0]]} has label {labels[wrong[0]]}, and the model {wide} outputs"
                remedy = f"Labels run from 0 to {wide - 1}: mend them, or give the model an output for each class."
    return UserError(f"step {step + 1}: {what}: {reason(error)}", remedy)


def kind_of(value: Any) -> str:
    """Type, shape and device of a tensor, float32 [16, 10] on cpu; of anything else its type."""
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


class StandIns:
    """Two samples of an earlier step, kept for a step that has none on this rank."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None  # images and labels
        self.count = 0  # of the kept

    def filled(self, images: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The same images [size, C, H, W] and labels; for size = 0 two of each.

        Not blank ones: a model may divide by its input's spread. And not one, which has no batch statistics.
        """
        if size:
            if self.count < min(2, size):
                self.kept, self.count = (images[:2].clone(), labels[:2].clone()), min(2, size)
            return images, labels
        if self.kept is None:
            ramp = torch.linspace(-1, 1, 2 * images[:0].new_empty(images.shape[1:]).numel(), device=images.device)
            self.kept = ramp.view(2, *images.shape[1:]).to(images.dtype), labels.new_zeros(2, *labels.shape[1:])
        images, labels = self.kept
        return (images, labels) if len(images) > 1 else (images.repeat_interleave(2, 0), labels.repeat_interleave(2, 0))


_NOTHING, _HOST = nullcontext(), torch.device("cpu")


class TrainStep:
    """`step(batch)` moves the weights by the global batch's gradient, whatever the number of ranks.

    Args:
        model: the module that `parallelize` returned, or any module in a world of one.
        loss: a function of (outputs, labels) that returns the mean over its samples, as torch's do, or each sample's
            loss, or a numerator and a denominator that are summed over the whole batch; or one of torch's loss modules.
            Class weights and ignored labels go with the module.
        optimizer: any torch optimizer over the model's parameters.
        precision: "fp32", "tf32", "bf16" or "fp16"; the last two through autocast, fp16 with a gradient scaler.
        clip_norm: largest global gradient norm (0: no clipping).
        schedule: learning-rate factor, a function of the samples seen before the step; multiplies each group's initial
            rate.
        seed: key of dropout and of whatever else the model draws.
        sync: how gradients are combined (default: as `parallelize` made `model`).
        skip_nonfinite: leave weights and buffers as they are where a gradient is not finite, on all ranks alike. It
            costs a wait for the device on every step.
        whole_batch: the loss compares samples with each other, as contrastive losses do: it gets the outputs and labels
            of the whole micro-batch, on every rank, and returns a scalar.
        law: what is done where a step would be another one on another number of processes (self_check.py): "warn" says
            it, "strict" raises it, "off" does not look.

    A shard's loss is its samples' sum divided by the global batch's true count, and gradients are summed; so uneven
    shares and a short last batch weigh every sample alike, and inside backward gradients are those of one process.
    Hooks on parameters are called once a step, on the gradient of the whole batch.
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
        skip_nonfinite: bool = False,
        whole_batch: bool = False,
        law: Law = "warn",
    ) -> None:
        self.model, self.loss, self.optimizer = model, terms_of(loss), optimizer
        self.bare, self._sharded = unwrap(model), is_sharded(model)
        self.clip_norm, self.schedule, self.seed, self.whole_batch = clip_norm, schedule, seed, whole_batch
        self.named = dict(self.bare.named_parameters())
        self.hooks = hooks_of(self.bare)
        device = next(model.parameters()).device
        self.sync: GradientSync = sync or sync_of(model)
        self._take_groups()
        require_sound(self.sync, precision, skip_nonfinite, clip_norm, whole_batch)
        self.autocast_dtype = LOW.get(precision)
        self.autocast = autocast(precision, device, cache=not self.sync.exact)
        self.scaler = scaler(precision, device)
        STEPS[optimizer] = weakref.ref(self)
        self._divides: bool | None = None  # whether the loss has denominators: known after the first passes
        self._divisor: Tensor | None = None  # their mean over the batch's samples
        self.checks_mean = not whole_batch  # in the next pass of several samples
        self._reseed, self.host_generators = seeding(driven(model)), HostGenerators(seed)
        compiled = any(map(is_compiled, model.modules()))
        self._replays = compiled and device.type != "cpu"  # perhaps: CUDA graphs are one of torch.compile's modes
        self.draws = Draws(seed, compiled)
        self._piece_dtype = torch.float64 if torch.float64 in {p.dtype for p in self.parameters} else torch.float32
        self._norms = step_batch_norms(model)
        self._stand_ins = StandIns()
        self.passes_write: bool | None = None  # whether forward or backward wrote into a parameter, in the first step
        self.calls, self.compares = 0, True  # whether the step after so many is
        self.own_loop = True  # of a user's: not that of the command
        self.left_out = False  # the last step, because of a gradient that was not finite (`skip_nonfinite` alone)
        self._skips = skip_nonfinite
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)  # so that counting waits for nothing
        self.before_pass: Callable[[int], object] | None = None
        self.apart = False  # what passes is a part of a batch that has passed before, in a comparison
        self.check = SelfCheck(self, law)

    def _take_groups(self) -> None:
        """Train what the optimizer's groups hold now."""
        require_ready(self.bare, self.optimizer)
        named = dict(self.bare.named_parameters())
        if {*map(id, named.values())} != {*map(id, self.named.values())}:
            self.named = named
            self.sync.take_parameters()
        groups = self.optimizer.param_groups
        self._held = [*groups, *(p for group in groups for p in group["params"])]
        own = {*map(id, self._held)}
        # in the model's order: that of an optimizer made of a set is another one in each process
        self.parameters = [p for p in self.named.values() if id(p) in own]
        # of another optimizer, perhaps: no gradient of theirs goes into a step, none is lost, and none is left by it
        self._others = [p for p in self.named.values() if id(p) not in own]
        self._needed = [] if self.sync.skips_unused else [p for p in self.parameters if p.requires_grad]
        for group in groups if self.schedule is not None else ():
            group.setdefault("initial_lr", group["lr"])

    def __call__(self, batch: Batch, *others: object) -> Tensor:
        """Take one step; returns the batch's mean loss, the same on all ranks, a scalar on the device (reading it waits
        for the device). On several ranks that takes a small all-reduce, for which nothing waits."""
        if others or not isinstance(batch, Batch):
            raise UserError(
                f"step takes one Batch, not {', '.join(type(each).__name__ for each in (batch, *others))}",
                "ls.loaders gives Batches: of a set's name, or of (train, val), Datasets or pairs of tensors of yours.",
            )
        loss = self.take(batch)
        if self.sync.ranks == 1 and loss.samples == [batch.count] and loss.means[0].dtype == self._piece_dtype:
            return loss.means[0]  # an operator is as much as 4 % of a small step
        summed = [times(mean, samples) for mean, samples in zip(*loss, strict=True)]
        own = torch.stack(summed) if summed else batch.images.new_zeros(0, dtype=torch.float64)
        mine = sum(shard.size for shard in batch.shards)
        return (self.sync.total(own, mine, batch.count) / batch.count).to(self._piece_dtype)

    def take(self, batch: Batch) -> RankLoss:
        """Take one step; returns this rank's part of the loss, which costs nothing until it is read."""
        self._follow_schedule(batch.samples)
        theirs = [(parameter, parameter.grad) for parameter in self._others]
        for parameter, _ in theirs:
            parameter.grad = None
        buffers = Kept(self.model.modules()) if self._skips else None
        first = self.passes_write is None
        marks = self._marks() if first and self.check.law != "off" else []
        if self.compares:
            self.sync.watch_buffers()
        check = self.check if (self.compares or self.check.again) and self.check.due() else None
        meets = self.sync.ranks > 1 and self.own_loop and self.check.law != "off"  # it may step on some ranks alone
        met = self.check.world.meet(f"step {batch.step + 1}") if meets else None
        self.calls += 1
        found = self.take_passes(batch) if check is None else check.take_passes(batch)
        if met is not None:
            met()
        if first:
            self.passes_write = bool(marks) and marks != self._marks()
            self._refuse_own_gradients()
        if self._norms:
            end_step(self._norms, batch.count, self.sync.ranks)
        if first if self.sync.exact else batch.shards and self.model is self.bare:
            self.require_gradients()
        self.sync.finish()
        if check is not None:
            check.compare(batch, found)
        loss = self._loss_of(found, batch)
        if self._divisor is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    local(parameter.grad).div_(self._divisor)
        # the same on all ranks, as gradients are after their reduction; waits for the device
        self.left_out = buffers is not None and not finite(self.parameters)
        if self.left_out and buffers is not None:
            buffers.restore()
        if self.left_out and self.scaler is None:
            self._skipped += 1
        else:  # fp16's scaler leaves the step out as well, and lowers its scale
            if check is None:
                self._update(batch.step)
            else:
                own_code = bool(self.hooks) or may_draw(self.optimizer)
                check.compare_update(batch.step, partial(self._update, batch.step), own_code and self.scaler is None)
        for parameter in self.parameters:  # optimizer.zero_grad takes 40 times as long
            parameter.grad = None
        for parameter, gradient in theirs:
            parameter.grad = gradient
        self.compares = is_checked(self.calls)
        if self.compares:
            self.check.note_generators(inspect.currentframe() if self.own_loop else None)
        return loss

    @property
    def skipped(self) -> int:
        """Steps left out because a gradient was not finite, the scaler's of fp16 among them; waits for the device."""
        return int(self._skipped)

    def _follow_schedule(self, samples: int) -> None:
        """Set the rates of the optimizer's groups; some may be new, or hold other parameters."""
        groups = self.optimizer.param_groups
        now = [*groups, *(p for group in groups for p in group["params"])]
        if len(now) != len(self._held) or not all(map(is_, now, self._held)):
            self._take_groups()
        if self.schedule is not None:
            factor = self.schedule(samples)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def _update(self, step: int) -> None:
        draws, hooked = may_draw(self.optimizer), bool(self.hooks)
        if draws or hooked:  # the same on every rank
            seed = stream(self.seed, "update", step)
            self._reseed(seed)
            seed_host(seed)
        if self.scaler is not None:
            # after the all-reduce an overflow of one rank is in every rank's gradients, so all skip the same step
            self.scaler.unscale_(self.optimizer)
            self._skipped += ~finite(self.parameters)
        if hooked:
            self.hooks.run(self.named)
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif draws:
            try:
                self.optimizer.step()
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                if "closure" not in str(error):
                    raise
                raise needs_closure(self.optimizer) from error
        else:
            update(self.optimizer)

    def require_gradients(self) -> None:
        """Raise UserError where passes of this rank (in exact mode, of any) left a parameter without its gradient.

        By name: DDP would report it by number, a step later.
        """
        if not (without := self.sync.without_gradient(self._needed)):
            return
        missing = {*map(id, without)}
        if unused := [name for name, p in self.named.items() if id(p) in missing and p.requires_grad]:
            raise UserError(
                f"{len(unused)} parameter(s) took no part in the loss: {', '.join(unused[:5])}",
                "Use them in forward(), whichever samples pass, freeze them with requires_grad_(False), or give "
                + ("parallelize find_unused_parameters=True." if self.own_loop else "--find-unused-parameters."),
            )

    def _refuse_own_gradients(self) -> None:
        """Raise UserError for a loss whose own parameters have been given a gradient, of this process's samples."""
        trained = HiddenState({"the loss": self.loss}).trained
        own = {*map(id, self.named.values())}
        if names := [name for name, p in trained.items() if p.grad is not None and id(p) not in own]:
            raise UserError(
                f"{names[0]} gets a gradient, and is no parameter of the model: nobody adds it up over the processes",
                "Make it part of the model, as of a module around it, or freeze it with requires_grad_(False).",
            )

    def take_gradients(self) -> list[Tensor | None]:
        """The gradients of the model's parameters, which have none afterwards."""
        found = [p.grad for p in self.named.values()]
        self.give_gradients([None] * len(found))
        return found

    def give_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """The inverse of `take_gradients`."""
        for p, gradient in zip(self.named.values(), gradients, strict=True):
            p.grad = gradient

    def take_passes(self, batch: Batch) -> list[Tensor]:
        """Forward and backward of each of this rank's shards: what `_pass` returns. Gradients stay where they are."""
        sizes = [shard.size for shard in batch.shards]
        if not sum(sizes) == len(batch.images) == len(batch.labels):
            raise UserError(
                f"step {batch.step + 1}: the batch holds {len(batch.images)} images and {len(batch.labels)} labels, "
                f"and came with {sum(sizes)} samples",
                "Each sample of a global batch counts once. To leave some out, give them no weight in a loss that "
                "returns one value a sample, or choose them beforehand, by a Subset; aug_repeats=2 takes each twice.",
            )
        images, labels = self.sync.cut(batch.images, sizes), self.sync.cut(batch.labels, sizes)

        def reseed(i: int) -> None:
            if self.before_pass is not None:
                self.before_pass(i)
            self._reseed(pass_seed(self.seed, batch.step, batch.shards[i].micro))
            self.host_generators.begin(batch.step, batch.shards[i].micro)

        def take(model: nn.Module, i: int) -> Tensor:
            shard = batch.shards[i]
            some, theirs = self._stand_ins.filled(images[i], labels[i], shard.size)
            try:
                ids = batch.all_ids[shard.rows] if shard.size else np.zeros(len(some), np.int64)
                bare = self.bare if model is self.model else unwrap(model)
                with keyed(self.draws, bare, batch.step, ids, some):
                    if self._sharded and self.draws.plan is None:  # no pass goes through it in the midst of a pass
                        with self.autocast():
                            require_planned(self.draws, model, some)
                    found = self._pass(model, some, theirs, shard, batch.count)
            except Exception as error:
                refusal = refusal_of(error, shard, batch.count, alone=self.model is self.bare)
                if refusal is None and not self.apart:
                    refusal = misfit_of(error, batch.step, batch.all_ids[shard.rows], unwrap(model))
                if refusal is not None:
                    raise refusal.with_traceback(error.__traceback__) from error
                raise
            if self._replays and i < len(sizes) - 1:  # the next replay of a CUDA graph writes into its own gradients
                for p in self.parameters:
                    p.grad = None if p.grad is None else p.grad.clone()
            if i == len(sizes) - 1 and model is self.model is not self.bare and not self.sync.exact:
                self.require_gradients()  # before any collective that the others would not answer
            return found

        return self.sync.passes(self.model, batch.shards, reseed, take)

    def _marks(self) -> list[str]:
        """Of each parameter, what changes where something is written into it: its version, or by .data its norm."""
        every = self.named.values()
        norms = [float(local(p.detach()).norm()) if p.is_floating_point() else 0.0 for p in every]
        return [f"{p._version} {norm}" for p, norm in zip(every, norms, strict=True)]

    def _loss_of(self, found: list[Tensor], batch: Batch) -> RankLoss:
        """This rank's loss. One with denominators: numerators / the mean denominator of the batch's samples, which its
        gradients are divided by too; that takes a small all-reduce."""
        if self._divides is None:
            self._divides = self.sync.anywhere(any(each.ndim for each in found))
        sizes = [shard.size for shard in batch.shards]
        if not self._divides:
            return RankLoss(found, sizes)
        terms = torch.stack(found) if found else batch.images.new_zeros(0, 2, dtype=torch.float64)
        self._divisor = self.sync.total(terms[:, 1], sum(sizes), batch.count) / batch.count
        # rounded shard by shard, as means over shards are: float64 adds such numbers without a loss, in any order
        return RankLoss([*(terms[:, 0] / self._divisor).to(self._piece_dtype)], [1] * len(sizes))

    def _pass(self, model: nn.Module, images: Tensor, labels: Tensor, shard: Shard, count: int) -> Tensor:
        """Forward and backward of one shard of a batch of `count`.

        Returns its mean loss, detached, or where it has a denominator both of them, [2].
        """
        samples = shard.size
        with announced(self._norms, shard, len(images), count) if self._norms else _NOTHING:
            with self.autocast():
                outputs = model(images)
                if self.whole_batch:
                    outputs, labels = self.sync.gather((outputs, labels), samples, len(images))
                    samples = shard.members
                if self.checks_mean and samples > 1:  # first: what the loss keeps must not move before its backward
                    self.checks_mean = False
                    with put_back({"the loss": self.loss}, [images.device]):
                        require_mean(self.loss, outputs, labels)
                value, denominator = self.loss(outputs, labels)
                if self.whole_batch and denominator is not None:
                    value, denominator = value / denominator, None
            if denominator is not None:  # the gradients are divided by it later; a rank without samples adds zeros
                samples = min(samples, 1)
            if model is self.model and shard.size:
                for name, p in self.named.items():
                    if p._backward_hooks or p._post_accumulate_grad_hooks:
                        self.hooks.take(name, p)
            loss = value if self.scaler is None else self.scaler.scale(value)
            backward(loss, scalar(samples / count, loss.dtype, loss.device))
        value = value.detach().clone() if self._replays else value.detach()  # the next replay may write there, too
        if denominator is not None:
            value = torch.stack([value.double(), denominator.double()])
        return value if shard.size else torch.zeros_like(value)
