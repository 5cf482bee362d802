"""Transforms of single pictures (`--augment`), whose draws are keyed by (seed, epoch, sample id, which transform).

Before each transform of each sample the generators that it draws from are seeded, and put back after the batch: 1.5 us
for torch's, 7 with Python's and NumPy's, for functions of the user's. Two runs that differ in one transform draw the
same for the others. Transforms work on the CPU, with one thread, whatever the device: so bits do not depend on these.
"""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from lockstep.config.objects import load_object
from lockstep.config.recipes import RECIPES
from lockstep.data.agreement import generators
from lockstep.data.image_sets import Ids, ImageSet
from lockstep.errors import UserError, reason, unknown, with_article
from lockstep.randomness import bits_np, stream

Apply = Callable[[Tensor], Tensor]  # uint8 [C, H, W] to uint8 [C, H, W]
_TRIED = 4  # times at the start, of one sample: a fault that shows now and then has some chance to


def _key(name: str) -> str:
    return re.sub("[-_]", "", name).lower()


@cache
def known() -> dict[str, type[v2.Transform]]:
    """torchvision's transforms by their names in lower case; a trial finds those that are not for pictures."""
    found = {_key(name): value for name, value in vars(v2).items() if inspect.isclass(value)}
    return {name: cls for name, cls in found.items() if issubclass(cls, v2.Transform)}


def is_own(spec: str) -> bool:
    """True for `package.module:function`, which is code of the user's."""
    name, _, rest = spec.partition(":")
    path = all(part.isidentifier() for part in (*name.split("."), *rest.split(".")))
    return path and _key(name) not in known()


def built(spec: str, shape: tuple[int, int, int], mean: Sequence[float]) -> Apply:
    """The transform that `NAME`, `NAME:VALUE,...,NAME=VALUE,...` or `package.module:function` names.

    A `size` that is not given is the pictures' of `shape`; `fill=mean` and `value=mean` are the set's `mean`. Raises
    UserError for an unknown name, and values that the transform does not take.
    """
    if is_own(spec):
        own = load_object(spec, "augment")
        if not callable(own) or inspect.isclass(own):
            raise UserError(f"--augment {spec} is no function", "It is called with uint8 [C, H, W] and returns that.")
        return cast(Apply, own)
    name, colon, text = spec.partition(":")
    if _key(name) not in known():
        remedy = "A recipe stands before the flags." if name in RECIPES else "Your own: package.module:function."
        raise unknown("transform", name, known(), remedy)
    cls = known()[_key(name)]
    takes = inspect.signature(cls).parameters
    try:
        args, kwargs = _values(text) if colon else ((), {})
        chance = kwargs.pop("p", None) if "p" not in takes else None
        bound = inspect.signature(cls).bind_partial(*args, **kwargs)
        if "size" in takes and takes["size"].default is inspect.Parameter.empty:
            bound.arguments.setdefault("size", shape[1:])
        arguments = {key: _as_torchvision(key, value, mean) for key, value in bound.arguments.items()}
        if arguments.get("value") == "random":
            raise ValueError("value=random is noise for pictures that are normalised already")
        transform = cls(**arguments)
        return cast(Apply, transform if chance is None else v2.RandomApply([transform], p=chance))
    except (TypeError, ValueError, SyntaxError) as error:
        defaults = {key: getattr(each.default, "value", each.default) for key, each in takes.items()}
        described = (key if value is inspect.Parameter.empty else f"{key}={value}" for key, value in defaults.items())
        raise UserError(f"--augment {spec}: {reason(error)}", f"It takes {', '.join(described)}.") from error


def _values(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`2,(0.1,1),p=0.5,fill=mean` as positional and named values; a bare word is a text."""
    call = ast.parse(f"_({text})", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text} are no values with commas between them")
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("** is no value")
    named = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    return tuple(_value(value) for value in call.args), named


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id.lower(), node.id)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"{ast.unparse(node)} is no number, word or list of numbers") from error


def _as_torchvision(key: str, value: Any, mean: Sequence[float]) -> Any:
    """A word as what torchvision wants in its place."""
    if value == "mean" and key in ("fill", "value"):
        return [round(255 * channel) for channel in mean]
    if key == "interpolation" and isinstance(value, str):
        return InterpolationMode(value.lower())
    return AutoAugmentPolicy(value.lower()) if key == "policy" and isinstance(value, str) else value


@dataclass(frozen=True)
class Step:
    """One transform of the list."""

    spec: str  # as it was typed
    word: str  # by which its draws are keyed: its name or path, and how many of this name are before it
    apply: Apply
    own: bool  # a function of the user's


_OWN = "It takes and returns a uint8 tensor [C, H, W]; normalising comes later."


@dataclass(frozen=True)
class Transforms:
    """The transforms of a run, in their order. Pickling keeps their names alone. Raises UserError as `built` does."""

    specs: tuple[str, ...]  # as `--augment` takes them
    seed: int  # the run's
    shape: tuple[int, int, int]  # channels, height and width; what comes out in another size is put back to this one
    mean: tuple[float, ...]  # of the set, per channel, of pixels in [0, 1]
    steps: tuple[Step, ...] = field(init=False)

    def __post_init__(self) -> None:
        steps, before = [], Counter[str]()
        for spec in self.specs:
            word = spec if is_own(spec) else _key(spec.partition(":")[0])
            steps.append(Step(spec, f"{word} {before[word]}", built(spec, self.shape, self.mean), is_own(spec)))
            before[word] += 1
        object.__setattr__(self, "steps", tuple(steps))

    def __reduce__(self) -> Any:
        return Transforms, (self.specs, self.seed, self.shape, self.mean)

    def __call__(self, images: Tensor, keys: Ids, epoch: int) -> Tensor:
        """images uint8 [b, C, H, W] on the CPU, which may be written to, and keys int64 [b] to uint8 [b, C, H, W].
        Raises UserError for a transform that fails or makes no picture, naming it and the sample.
        """
        out = torch.empty_like(images)
        seeds = [bits_np(stream(self.seed, "augment", step.word, epoch), keys).tolist() for step in self.steps]
        with generators(any(step.own for step in self.steps)) as seed, torch.no_grad():
            for row, sample in enumerate(keys.tolist()):
                image = images[row]
                for step, own_seeds in zip(self.steps, seeds, strict=True):
                    seed(own_seeds[row], step.own)
                    image = self._applied(step, image, sample, epoch)
                if image.shape != out.shape[1:]:
                    image = F.interpolate(image[None], self.shape[1:], mode="bilinear", antialias=True)[0]
                out[row] = image
        return out

    def _applied(self, step: Step, image: Tensor, sample: int, epoch: int) -> Tensor:
        try:
            made = step.apply(image)
        except Exception as error:
            inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if step.own and inside:  # its traceback is the user's best guide
                error.add_note(f"in --augment {step.spec}, sample {sample}, epoch {epoch}")
                raise
            remedy = _OWN if step.own else "Change its values."
            raise UserError(f"--augment {step.spec}, sample {sample}: {reason(error)}", remedy) from error
        if not isinstance(made, Tensor) or made.dtype != torch.uint8 or made.ndim != 3:
            got = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else with_article(made)
            raise UserError(f"--augment {step.spec} makes {got} of a picture", _OWN)
        if made.shape[0] != self.shape[0] or not made.numel():
            what = f"--augment {step.spec} makes {list(made.shape)} of a picture of {list(image.shape)}"
            raise UserError(what, f"The model takes {self.shape[0]} channel(s), as `grayscale:3` keeps three.")
        return made


def tried_transforms(specs: tuple[str, ...], seed: int, images: ImageSet) -> Transforms | None:
    """The transforms for a set, tried on its first picture, so that what can't work fails before the first step.
    Raises UserError also for a set of pictures that are no uint8.
    """
    if not specs:
        return None
    found = Transforms(specs, seed, images.shape, images.mean)
    first = np.zeros(1, np.int64)
    pixels, _ = images.read(first, None)
    if pixels.dtype != torch.uint8:
        what = f"the pictures of {images.name} are {pixels.dtype}, and taken as normalised already"
        raise UserError(f"--augment {specs[0]}: {what}", "Give uint8 pictures, or transform them in the set itself.")
    for epoch in range(_TRIED):
        found(pixels.clone(), first, epoch)
    return found
