"""Mixed precision and torch.compile, watched: a scaler's factor, the steps that it leaves out, what is compiled."""

import functools
from typing import Any

import torch
from torch import nn

from lockstep.commands.reproduce.recorder import Recorder


def watch(recorder: Recorder) -> None:
    """Have gradient scalers and torch.compile tell the recorder from here on."""
    _watch_scaler(recorder)
    _watch_compile(recorder)


def autocast_type() -> str:
    """What autocast casts to here, as "bfloat16"; "" where it is off."""
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return ""


def _watch_scaler(recorder: Recorder) -> None:
    kind: Any = torch.amp.GradScaler
    scale, unscale, step = kind.scale, kind.unscale_, kind.step

    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        found = scale(self, outputs)
        recorder.scale = float(self.get_scale()) if self.is_enabled() else 1.0
        return found

    @functools.wraps(unscale)
    def unscaled(self: Any, optimizer: Any) -> None:
        unscale(self, optimizer)
        recorder.unscaled = True
        recorder.touched()

    @functools.wraps(step)
    def stepped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found = step(self, optimizer, *args, **kwargs)
        if recorder.passes:  # the optimizer's own step has not been called: a gradient was not finite
            recorder.skipped += 1
        recorder.passes, recorder.scale, recorder.unscaled = [], 1.0, False
        return found

    kind.scale, kind.unscale_, kind.step = scaled, unscaled, stepped


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
