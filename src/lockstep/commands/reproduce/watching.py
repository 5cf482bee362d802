"""Where torch is watched for the recorder: what a training loop must pass.

That is the outermost module's call, the loss function, backward, the optimizer's step. Nothing of it changes what is
computed but one thing: what the model draws in forward, as dropout's masks, is drawn from Lockstep's keys (seed, step,
sample) instead of torch's generator, so that it can be drawn again.
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.commands.reproduce.recorder import Pass, Recorder, digest
from lockstep.training.drawn import drawn, draws_of

LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits")


def watch(recorder: Recorder) -> None:
    """Have torch tell the recorder from here on."""
    recorder.loaders.rates = recorder.rates
    _watch_calls(recorder)
    for name in LOSSES:
        _watch_loss(recorder, name)
    _watch_backward(recorder)
    _watch_clipping(recorder)
    _watch_seed(recorder)
    register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.before_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: recorder.after_step(optimizer))


def bare(module: nn.Module) -> nn.Module:
    """The module without what wraps it."""
    while (inner := getattr(module, "module", None) or getattr(module, "_orig_mod", None)) is not None:
        if not isinstance(inner, nn.Module) or len(list(module.children())) != 1:
            break
        module = inner
    return module


def _watch_calls(recorder: Recorder) -> None:
    original = nn.Module.__call__

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.depth or not (self.training and torch.is_grad_enabled()):
            return original(self, *args, **kwargs)
        if not any(each.requires_grad for each in self.parameters()):
            return original(self, *args, **kwargs)
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
        for name, kind in (("cpu", "cpu"), ("cuda", "cuda")):
            if torch.is_autocast_enabled(kind):
                recorder.autocast = str(torch.get_autocast_dtype(name)).removeprefix("torch.")
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
    return drawn(recorder.draws, model, len(recorder.taken), np.array(ids), images)


def _noted(recorder: Recorder, outputs: Any) -> None:
    if recorder.classes or not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return
    recorder.classes = outputs.shape[1]
    total = outputs.detach().double().logsumexp(1).abs().max()
    recorder.log_probabilities = bool(total < 1e-4)


def _watch_loss(recorder: Recorder, name: str) -> None:
    original: Callable[..., Tensor] = getattr(F, name)

    @functools.wraps(original)
    def loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        recorder.depth += 1  # a mode of torch's functions calls this once more
        try:
            value = original(input, target, *args, **kwargs)
        finally:
            recorder.depth -= 1
        if recorder.depth == 0 and recorder.on and value.requires_grad and recorder.passes:
            last = recorder.passes[-1]
            if last.labels is not None:
                recorder.say("the loss of a pass is made of several")
            last.labels = target.detach().cpu().clone()
            last.loss = float(value.detach().mean())
            _note_options(recorder, name, args, kwargs)
        return value

    setattr(F, name, loss)


def _note_options(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    options = dict(zip(("weight", "size_average", "ignore_index", "reduce", "reduction"), args, strict=False)) | kwargs
    weight = options.pop("weight", None)
    plain = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    found = {key: value for key, value in options.items() if value is not None and plain.get(key) != value}
    recorder.loss = {"name": name, "options": {key: repr(value) for key, value in found.items()}}
    recorder.loss["smoothing"] = float(found.get("label_smoothing", 0.0))
    recorder.weight = None if weight is None else weight.detach().cpu().clone()


def _watch_backward(recorder: Recorder) -> None:
    original = Tensor.backward

    @functools.wraps(original)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        if recorder.on and recorder.passes and self.numel() == 1:
            recorder.passes[-1].backward = float(self.detach())
        recorder.loaders.trained()
        # checkpointed parts are computed again in there, and are no pass of their own
        recorder.depth += 1
        try:
            original(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            recorder.depth -= 1

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
            return _original(parameters, most, *args, **kwargs)

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
