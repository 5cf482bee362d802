"""Where torch is watched for the recorder: what a training loop must pass.

That is the outermost module's call, the loss function, backward, the optimizer's step, and what scales, clips and
compiles. Nothing of it changes what is computed but one thing: what the model draws in forward, as dropout's masks, is
drawn from Lockstep's keys (seed, step, sample) instead of torch's generator, so that it can be drawn again.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.commands.audit.events import argument, around, line_in
from lockstep.commands.audit.recorders.ranks import OPERATIONS
from lockstep.commands.reproduce.recorder import Pass, Recorder, digest
from lockstep.rng.draws import Draws
from lockstep.rng.intercept import keyed

_TIMM = ("LabelSmoothingCrossEntropy", "SoftTargetCrossEntropy")  # torch's cross-entropy by other names
_LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits")
_PLAIN_OPTIONS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}


def watch(recorder: Recorder) -> None:
    """Have torch tell the recorder from here on."""
    recorder.loaders.rates = recorder.rates
    watch_calls(recorder)
    for name in _LOSSES:
        _watch_loss(recorder, name)
    _watch_backward(recorder)
    _watch_clipping(recorder)
    _watch_scaler(recorder)
    _watch_compile(recorder)

    def manual_seed(original: Any, seed: int) -> torch.Generator:
        if recorder.seed is None and recorder.model is None:
            recorder.seed = int(seed)
        return original(seed)  # type: ignore[no-any-return]

    for module in (torch, torch.random):
        around(module, "manual_seed", manual_seed)

    def reduce(original: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.reduces = recorder.reduces or bool(recorder.evaluated)
        return original(*args, **kwargs)

    for name in (each for each in OPERATIONS if ("reduce" in each or "gather" in each) and hasattr(dist, each)):
        around(dist, name, reduce)
    register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.before_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: recorder.after_step(optimizer))


@contextmanager
def _inside(recorder: Recorder) -> Iterator[None]:
    """What is called inside belongs to the call around it, and is not recorded by itself."""
    recorder.depth += 1
    try:
        yield
    finally:
        recorder.depth -= 1


def bare(module: nn.Module) -> nn.Module:
    """The module without what wraps it."""
    while (inner := getattr(module, "module", None) or getattr(module, "_orig_mod", None)) is not None:
        if not isinstance(inner, nn.Module) or inner is module or len(list(module.children())) != 1:
            break
        module = inner
    return module


def watch_calls(recorder: Recorder) -> None:
    """Have each call of an outermost module tell the recorder."""

    def called(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.depth:
            return original(module, *args, **kwargs)
        if not torch.is_grad_enabled():
            if not module.training:
                _note_evaluated(recorder, bare(module))
            with _inside(recorder):  # its layers are no other models
                return original(module, *args, **kwargs)
        if not module.training or not any(each.requires_grad for each in module.parameters()):
            value = original(module, *args, **kwargs)
            if type(module).__name__ in _TIMM and isinstance(value, Tensor):
                smoothing = {"label_smoothing": vars(module).get("smoothing")}
                _note_loss(recorder, "cross_entropy", value, args[1], (), smoothing)
            return value
        if torch.get_default_dtype() == torch.float64:  # the plan's; what a file holds may be float32
            floats = [isinstance(each, Tensor) and each.is_floating_point() for each in args]
            args = tuple(each.double() if is_float else each for each, is_float in zip(args, floats, strict=True))
        with _inside(recorder), _begun(recorder, module, args):
            outputs = original(module, *args, **kwargs)
        _note_outputs(recorder, outputs)
        return outputs

    around(nn.Module, "__call__", called)


def _begun(recorder: Recorder, module: nn.Module, args: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Note a training pass of the outermost module; the context that its draws are keyed in."""
    model = bare(module)
    if recorder.model is None:
        recorder.model = model
        recorder.place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        recorder.initial = {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}
        recorder.draws = Draws(recorder.seed or 0)
        casts = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
        recorder.autocast = str(torch.get_autocast_dtype(casts[0])).removeprefix("torch.") if casts else ""
        filters = [each for each in model.parameters() if each.ndim == 4 and not each.is_contiguous()]
        recorder.channels_last = any(each.is_contiguous(memory_format=torch.channels_last) for each in filters)
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
        recorder.say("the model gets other samples than a DataLoader's batch")
        return nullcontext()
    recorder.passes.append(Pass(ids, images.detach().cpu().clone()))
    if last is not None:
        _note_changed(recorder, "images", images, last[2], 0)
    return keyed(recorder.draws, model, len(recorder.taken), np.array(ids), images)


def _note_outputs(recorder: Recorder, outputs: Any) -> None:
    if recorder.classes or not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return
    recorder.classes = outputs.shape[1]
    total = outputs.detach().double().logsumexp(1).abs().max()
    recorder.log_probabilities = bool(total < 1e-4)


def _note_evaluated(recorder: Recorder, model: nn.Module) -> None:
    """Note which model is evaluated: the trained one, a copy of it, as averages of its weights are, or another."""
    if recorder.model is None or next(model.parameters(), None) is None:
        return
    named = "copy" if type(model) is type(recorder.model) else "another"
    recorder.evaluated.add("model" if model is recorder.model else named)


def _watch_backward(recorder: Recorder) -> None:
    def backward(original: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if recorder.on and recorder.passes and loss.numel() == 1:
            last = recorder.passes[-1]
            last.backward, last.at = float(loss.detach()) / recorder.scale, line_in(recorder.home)
            if last.labels is None:
                recorder.say("backward is called on a loss that is none of torch's cross-entropies")
        if recorder.loaders.last is not None:
            recorder.loaders.last[0].trains = True  # its last batch is learned from
        with _inside(recorder):  # checkpointed parts are computed again in there, and are no pass of their own
            original(loss, *args, **kwargs)
        recorder.touched()

    around(Tensor, "backward", backward)


def _watch_clipping(recorder: Recorder) -> None:
    for name in ("clip_grad_norm_", "clip_grad_value_"):

        def clip(original: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            most = argument(args, kwargs, 1, "max_norm" if _name == "clip_grad_norm_" else "clip_value")
            found = (_name, float(most), float(argument(args, kwargs, 2, "norm_type", 2.0)))
            if found not in recorder.clips:
                recorder.clips.append(found)
            if not recorder.unscaled:
                recorder.clip_scale = recorder.scale
            norm = original(*args, **kwargs)
            recorder.touched()
            return norm

        for module in (nn.utils, nn.utils.clip_grad):
            around(module, name, clip)


def _watch_loss(recorder: Recorder, name: str) -> None:
    def loss(original: Any, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _inside(recorder):  # a mode of torch's functions calls this once more
            value = original(input, target, *args, **kwargs)
        if recorder.depth == 0:
            _note_loss(recorder, name, value, target, args, kwargs)
        return value

    around(nn.functional, name, loss)


def _note_loss(
    recorder: Recorder, name: str, value: Tensor, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Note the loss of the last pass: its value, its labels, its options."""
    if not (recorder.on and value.requires_grad and recorder.passes):
        return
    last = recorder.passes[-1]
    if last.labels is not None:
        recorder.say("the loss of a pass is a sum of several")
    last.labels = target.detach().cpu().clone()
    last.loss = float(value.detach().mean())
    if recorder.loaders.last is not None:
        _note_changed(recorder, "labels", target, recorder.loaders.last[2], 1)
    _note_options(recorder, name, args, kwargs)


def _note_changed(recorder: Recorder, what: str, tensor: Tensor, batch: Any, place: int) -> None:
    """Note where images or labels are no longer those of the loader's batch; labels as one-hot rows still are."""
    read = batch[place] if isinstance(batch, list | tuple) and len(batch) > place else None
    if what in recorder.changed or not isinstance(read, Tensor):
        return
    tensor, read = tensor.detach().cpu(), read.detach().cpu()
    if what == "labels" and tensor.ndim == 2 and read.ndim == 1 and bool((tensor.max(1).values == 1).all()):
        tensor = tensor.argmax(1) if bool((tensor.sum(1) == 1).all()) else tensor
    if tensor.numel() != read.numel() or not torch.equal(tensor.reshape(-1).double(), read.reshape(-1).double()):
        recorder.changed[what] = line_in(recorder.home)


def _note_options(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    options = dict(zip(("weight", "size_average", "ignore_index", "reduce", "reduction"), args, strict=False)) | kwargs
    weight = options.pop("weight", None)
    found = {key: value for key, value in options.items() if value is not None and _PLAIN_OPTIONS.get(key) != value}
    bare = name == "binary_cross_entropy_with_logits" and weight is not None
    strange = {key: value for key, value in found.items() if key not in ("label_smoothing", "reduction")}
    if found.get("reduction") == "sum":
        recorder.say("the loss is a sum over its samples, and not their mean")
    elif strange or bare:
        recorder.say(f"the loss has options that no flag says: {', '.join(strange) or 'weight'}")
    recorder.loss = {"name": name, "options": {key: repr(value) for key, value in found.items()}}
    recorder.loss["smoothing"] = float(found.get("label_smoothing", 0.0))
    recorder.weight = None if weight is None else weight.detach().cpu().clone()


def _watch_scaler(recorder: Recorder) -> None:
    def scale(original: Any, scaler: Any, outputs: Any) -> Any:
        found = original(scaler, outputs)
        recorder.scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        return found

    def unscale(original: Any, *args: Any) -> None:
        original(*args)
        recorder.unscaled = True
        recorder.touched()

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if recorder.passes:  # the optimizer's own step has not been called: a gradient was not finite
            recorder.skipped += 1
        recorder.passes, recorder.scale, recorder.unscaled = [], 1.0, False
        return found

    for name, wrapper in {"scale": scale, "unscale_": unscale, "step": step}.items():
        around(torch.amp.GradScaler, name, wrapper)


def _watch_compile(recorder: Recorder) -> None:
    """Nothing is compiled: that changes no number but by rounding, and a compiler can't be watched from within."""

    def note(mode: Any) -> None:
        recorder.compiled = mode if isinstance(mode, str) else "default"

    def compile(model: Any = None, *, mode: Any = None, **_: Any) -> Any:
        if model is None:
            return lambda function: compile(function, mode=mode)
        note(mode)
        if isinstance(model, nn.Module):
            object.__setattr__(model, "_orig_mod", model)  # the name that a compiled model has for the plain one
        return model

    def compile_module(self: nn.Module, *_: Any, mode: Any = None, **__: Any) -> None:
        del self
        note(mode)

    vars(torch)["compile"] = compile
    nn.Module.compile = compile_module  # type: ignore[method-assign]
