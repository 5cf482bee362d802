"""The loss function of a script: which it is, with what options, over which labels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.commands.reproduce.places import user_line
from lockstep.commands.reproduce.recorder import Recorder

LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits")
_PLAIN_OPTIONS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}


def watch_loss(recorder: Recorder, name: str) -> None:
    """Have one of LOSSES tell the recorder when it is called."""
    original: Callable[..., Tensor] = getattr(F, name)

    @functools.wraps(original)
    def loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        recorder.depth += 1  # a mode of torch's functions calls this once more
        try:
            value = original(input, target, *args, **kwargs)
        finally:
            recorder.depth -= 1
        if recorder.depth == 0:
            note_loss(recorder, name, value, target, args, kwargs)
        return value

    setattr(F, name, loss)


def note_loss(
    recorder: Recorder, name: str, value: Tensor, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Note the loss of the last pass: its value, its labels, its options."""
    if not (recorder.on and value.requires_grad and recorder.passes):
        return
    last = recorder.passes[-1]
    if last.labels is not None:
        recorder.say("the loss of a pass is made of several")
    last.labels = target.detach().cpu().clone()
    last.loss = float(value.detach().mean())
    if recorder.loaders.last is not None:
        note_changed(recorder, "labels", target, recorder.loaders.last[2], 1)
    _note_options(recorder, name, args, kwargs)


def note_changed(recorder: Recorder, what: str, given: Tensor, batch: Any, place: int) -> None:
    """Note where images or labels are no longer those of the loader's batch; labels as one-hot rows still are."""
    read = batch[place] if isinstance(batch, list | tuple) and len(batch) > place else None
    if what in recorder.changed or not isinstance(read, Tensor):
        return
    given, read = given.detach().cpu(), read.detach().cpu()
    if what == "labels" and given.ndim == 2 and read.ndim == 1 and bool((given.max(1).values == 1).all()):
        given = given.argmax(1) if bool((given.sum(1) == 1).all()) else given
    if given.numel() != read.numel() or not torch.equal(given.reshape(-1).double(), read.reshape(-1).double()):
        recorder.changed[what] = user_line(recorder.home)


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
