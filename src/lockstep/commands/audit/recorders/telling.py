"""What a script says: lines of its output with a number in them, and losses, which those numbers may be of."""

import re
import sys
from typing import Any

import torch

from lockstep.commands.audit.events import emit, silence, user_line
from lockstep.commands.audit.plan import Plan

_NUMBER = re.compile(r"\d\.\d")
_MOST, _LONG = 400, 300  # lines of a process that are told, and characters of a line
_left = [_MOST]


def install(_plan: Plan) -> None:
    """Listen to what is written to standard output and error, by print, loggers and bars alike."""
    for stream in (sys.stdout, sys.stderr):
        _listen(stream)


def _listen(stream: Any) -> None:
    write, begun = stream.write, [""]

    def heard(text: str) -> Any:
        *lines, begun[0] = (begun[0] + text).split("\n")
        begun[0] = begun[0][-_LONG:]
        for line in lines:
            if _left[0] > 0 and _NUMBER.search(line) and user_line():
                _left[0] -= 1
                emit("told", text=line[:_LONG])
        return write(text)

    stream.write = heard


def tell_loss(found: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a loss as the mean over its samples, and how many these are."""
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    if not isinstance(target, torch.Tensor) or not target.dim():
        return
    with silence():
        size = int(target.shape[0])
        value = float(found.detach().double().mean())
    if size and kwargs.get("reduction") == "sum":
        value /= size
    emit("loss", value=value, size=size, learns=found.requires_grad)


_normalised = {False: 2, True: 2}  # events that are left: of pixels that are not negative, and of such


def tell_pixels(module: Any, args: tuple[Any, ...]) -> None:
    """Record what a transform that normalises is given."""
    image = next((each for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()), None)
    if image is None or not image.numel():
        return
    with silence():
        wide = image.detach().double()
        negative = bool(wide.min() < 0)
        if _normalised[negative] <= 0:
            return
        _normalised[negative] -= 1
        mean, spread = (torch.as_tensor(getattr(module, name, 0.0)).double().mean() for name in ("mean", "std"))
        told = {"low": float(wide.min()), "high": float(wide.max())}
        told |= {"mean": float((wide.mean() - mean) / spread), "spread": float(wide.std() / spread)}
    emit("normalised", told)
