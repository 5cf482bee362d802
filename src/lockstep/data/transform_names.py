"""Transforms as text: `randaugment:2,9`, `gaussianblur:3,sigma=(0.1,1),p=0.5`, `package.module:function`."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast

from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from lockstep.config.objects import load_object
from lockstep.config.recipes import RECIPES
from lockstep.errors import UserError, reason, unknown

Apply = Callable[[Tensor], Tensor]  # uint8 [C, H, W] to uint8 [C, H, W]

# what takes more than a picture, makes several of one, or is no picture afterwards
_OTHERS = {
    "it mixes pictures and their labels, a batch at a time": ("CutMix", "MixUp"),
    "it takes other transforms: name these, or make a function of your own": (
        *("Compose", "Lambda", "RandomApply", "RandomChoice", "RandomOrder", "Transform", "LinearTransformation"),
    ),
    "it is for boxes, points and videos": (
        *("ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat", "RandomIoUCrop", "SanitizeBoundingBoxes"),
        *("SanitizeKeyPoints", "SetClampingMode", "UniformTemporalSubsample"),
    ),
    "it makes several pictures of one": ("FiveCrop", "TenCrop"),
    "pictures stay uint8 tensors here, and are normalised afterwards": (
        *("ConvertImageDtype", "Normalize", "PILToTensor", "ToDtype", "ToImage", "ToPILImage", "ToPureTensor"),
        "ToTensor",
    ),
}


def _key(name: str) -> str:
    return re.sub("[-_]", "", name).lower()


_REFUSED = {_key(name): why for why, names in _OTHERS.items() for name in names}


@cache
def known() -> dict[str, type[v2.Transform]]:
    """torchvision's transforms of one picture, by their names in lower case."""
    found = {_key(name): value for name, value in vars(v2).items() if inspect.isclass(value)}
    return {name: cls for name, cls in found.items() if issubclass(cls, v2.Transform) and name not in _REFUSED}


def is_own(spec: str) -> bool:
    """True for `package.module:function`, which is code of the user's."""
    name, _, rest = spec.partition(":")
    path = all(part.isidentifier() for part in (*name.split("."), *rest.split(".")))
    return path and _key(name) not in known() and _key(name) not in _REFUSED


def word_of(spec: str) -> str:
    """By which the draws of a transform are keyed: its name without its values, a function's path."""
    return spec if is_own(spec) else _key(spec.partition(":")[0])


def built(spec: str, shape: tuple[int, int, int], mean: Sequence[float]) -> Apply:
    """The transform that a text names.

    Args:
        spec: `NAME`, `NAME:VALUE,...,NAME=VALUE,...` or `package.module:function`.
        shape: channels, height and width of the pictures; a `size` that is not given is their height and width.
        mean: the set's, per channel, of pixels in [0, 1]; what `fill=mean` or `value=mean` stands for.

    Raises:
        UserError: for an unknown name, and values that the transform does not take.
    """
    if is_own(spec):
        own = load_object(spec, "augment")
        if not callable(own) or inspect.isclass(own):
            raise UserError(f"--augment {spec} is no function", "It is called with uint8 [C, H, W] and returns that.")
        return cast(Apply, own)
    name, colon, text = spec.partition(":")
    if why := _REFUSED.get(_key(name)):
        raise UserError(f"--augment {spec}: {why}", "Leave it out.")
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
        given = {key: _meant(key, value, mean) for key, value in bound.arguments.items()}
        if given.get("value") == "random":
            raise ValueError("value=random is noise for pictures that are normalised already")
        made = cls(**given)
        return cast(Apply, made if chance is None else v2.RandomApply([made], p=chance))
    except (TypeError, ValueError, SyntaxError) as error:
        raise UserError(f"--augment {spec}: {reason(error)}", f"It takes {', '.join(_described(takes))}.") from error


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


def _meant(key: str, value: Any, mean: Sequence[float]) -> Any:
    """A word as what torchvision wants in its place."""
    if value == "mean" and key in ("fill", "value"):
        return [round(255 * channel) for channel in mean]
    if key == "interpolation" and isinstance(value, str):
        return InterpolationMode(value.lower())
    if key == "policy" and isinstance(value, str):
        return AutoAugmentPolicy(value.lower())
    return value


def _described(takes: Any) -> Iterator[str]:
    for key, parameter in takes.items():
        default = getattr(parameter.default, "value", parameter.default)
        yield key if parameter.default is parameter.empty else f"{key}={default}"
