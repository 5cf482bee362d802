"""Where torch is watched for the recorder: what a training loop must pass.

That is the outermost module's call, the loss function, backward, the optimizer's step. Nothing of it changes what is
computed but one thing: what the model draws in forward, as dropout's masks, is drawn from Lockstep's keys (seed, step,
sample) instead of torch's generator, so that it can be drawn again.
"""

import functools
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.commands.reproduce import mixed
from lockstep.commands.reproduce.losses import LOSSES, note_changed, note_loss, watch_loss
from lockstep.commands.reproduce.places import user_line
from lockstep.commands.reproduce.recorder import Pass, Recorder, digest
from lockstep.training.drawn import drawn, draws_of

_TIMM = ("LabelSmoothingCrossEntropy", "SoftTargetCrossEntropy")  # torch's cross-entropy by other names


def watch(recorder: Recorder) -> None:
    """Have torch tell the recorder from here on."""
    recorder.loaders.rates = recorder.rates
    _watch_calls(recorder)
    for name in LOSSES:
        watch_loss(recorder, name)
    _watch_backward(recorder)
    _watch_clipping(recorder)
    mixed.watch(recorder)
    _watch_seed(recorder)
    register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.before_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: recorder.after_step(optimizer))


def bare(module: nn.Module) -> nn.Module:
    """The module without what wraps it."""
    while (inner := getattr(module, "module", None) or getattr(module, "_orig_mod", None)) is not None:
        if not isinstance(inner, nn.Module) or inner is module or len(list(module.children())) != 1:
            break
        module = inner
    return module


def _watch_calls(recorder: Recorder) -> None:
    original = nn.Module.__call__

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.depth or not torch.is_grad_enabled():
            if not (recorder.depth or self.training):
                _note_evaluated(recorder, bare(self))
            return original(self, *args, **kwargs)
        if not self.training or not any(each.requires_grad for each in self.parameters()):
            value = original(self, *args, **kwargs)
            if type(self).__name__ in _TIMM and isinstance(value, Tensor):
                note_loss(
                    recorder, "cross_entropy", value, args[1], (), {"label_smoothing": vars(self).get("smoothing")}
                )
            return value
        recorder.depth += 1
        if torch.get_default_dtype() == torch.float64:  # the plan's; what a file holds may be float32
            args = tuple(each.double() if _is_float(each) else each for each in args)
        try:
            with _begun(recorder, self, args):
                outputs = original(self, *args, **kwargs)
            _noted(recorder, outputs)
            return outputs
        finally:
            recorder.depth -= 1

    nn.Module.__call__ = __call__  # type: ignore[method-assign]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _begun(recorder: Recorder, module: nn.Module, args: tuple[Any, ...]) -> Any:
    """Note a training pass of the outermost module; the context that its draws are keyed in."""
    model = bare(module)
    if recorder.model is None:
        recorder.model, recorder.wrapper = model, type(module).__name__ if module is not model else ""
        recorder.initial = {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}
        recorder.draws = draws_of(recorder.seed or 0)
        recorder.autocast = mixed.autocast_type()
        recorder.channels_last = any(_is_channels_last(each) for each in model.parameters())
    if model is not recorder.model:
        recorder.say("several models are trained, or one in parts")
    if not recorder.on:
        return nullcontext()
    begins = recorder.optimizer is not None and not recorder.passes and not math.isnan(recorder.digest)
    if begins and recorder.optimizer is not None and digest(recorder.optimizer) != recorder.digest:
        recorder.say("something beside the optimizer moves the weights between steps")
    if len(args) != 1 or not isinstance(args[0], Tensor):
        recorder.say(f"the model is called with {len(args)} arguments, not with images alone")
        return nullcontext()
    images, last = args[0], recorder.loaders.last
    ids = last[1] if last is not None else []
    if len(ids) != len(images):
        recorder.say("the model is given other samples than a DataLoader's batch")
        return nullcontext()
    recorder.passes.append(Pass(ids, images.detach().cpu().clone()))
    if last is not None:
        note_changed(recorder, "images", images, last[2], 0)
    return drawn(recorder.draws, model, len(recorder.taken), np.array(ids), images)


def _noted(recorder: Recorder, outputs: Any) -> None:
    if recorder.classes or not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return
    recorder.classes = outputs.shape[1]
    total = outputs.detach().double().logsumexp(1).abs().max()
    recorder.log_probabilities = bool(total < 1e-4)


def _note_evaluated(recorder: Recorder, model: nn.Module) -> None:
    """Note which model is evaluated; one that was not trained is a moving average, or another."""
    if recorder.model is None or next(model.parameters(), None) is None:
        return
    average = recorder.copies.average()
    named = "average" if average is not None and average.module is model else "another"
    recorder.evaluated.add("model" if model is recorder.model else named)


def _is_channels_last(weight: Tensor) -> bool:
    if weight.ndim != 4 or weight.is_contiguous():
        return False
    return weight.is_contiguous(memory_format=torch.channels_last)


def _watch_backward(recorder: Recorder) -> None:
    original = Tensor.backward

    @functools.wraps(original)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        if recorder.on and recorder.passes and self.numel() == 1:
            last = recorder.passes[-1]
            last.backward, last.at = float(self.detach()) / recorder.scale, user_line(recorder.home)
            if last.labels is None:
                recorder.say("backward is called on a loss that is none of torch's cross-entropies")
        recorder.loaders.trained()
        # checkpointed parts are computed again in there, and are no pass of their own
        recorder.depth += 1
        try:
            original(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            recorder.depth -= 1
        recorder.touched()

    Tensor.backward = backward  # type: ignore[method-assign]


def _watch_clipping(recorder: Recorder) -> None:
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original = getattr(nn.utils, name)

        @functools.wraps(original)
        def clip(
            parameters: Any, most: float, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any
        ) -> Any:
            found = (_name, float(most), float(kwargs.get("norm_type", args[0] if args else 2.0)))
            if found not in recorder.clips:
                recorder.clips.append(found)
            if not recorder.unscaled:
                recorder.clip_scale = recorder.scale
            norm = _original(parameters, most, *args, **kwargs)
            recorder.touched()
            return norm

        setattr(nn.utils, name, clip)
        setattr(nn.utils.clip_grad, name, clip)


def _watch_seed(recorder: Recorder) -> None:
    original = torch.manual_seed

    @functools.wraps(original)
    def manual_seed(seed: int) -> torch.Generator:
        if recorder.seed is None and recorder.model is None:
            recorder.seed = int(seed)
        return original(seed)

    torch.manual_seed = manual_seed
    torch.random.manual_seed = manual_seed
