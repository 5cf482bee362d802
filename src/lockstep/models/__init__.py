"""Models by name: ours, any of torchvision's classifiers, any of timm's, or package.module:factory."""

import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.config.objects import load_object
from lockstep.errors import UserError, unknown, with_article
from lockstep.models import cifar10_speed, small

_SMALL: dict[str, Callable[[int, int, int], nn.Module]] = {
    "digits_net": small.digits_net,
    "mlp": small.mlp,
    "mnist_net": small.mnist_net,
    "speed_net": cifar10_speed.SpeedNet,
}
_TIMM = "timm/"


def names() -> list[str]:
    """Our own models, in alphabetical order."""
    return sorted((*_SMALL, *small.NAMES))


def check(name: str) -> None:
    """Raise UserError where `build` would not know the name. Builds nothing.

    Imports timm (seconds) only where the name is neither ours nor torchvision's.
    """
    _builder(name)


def build(name: str, *, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """A model with fresh weights, drawn from torch's current seed: the caller seeds.

    It maps images, float [b, in_channels, image_size, image_size], to logits, float [b, num_classes].
    torchvision's models expect three channels: for one, the three input planes of the first convolution are added up,
    which computes what feeding the grey image three times would; for another number they are repeated and rescaled.
    Raises UserError for an unknown name, or a model that can't take images of this size.
    """
    return _builder(name)(in_channels, num_classes, image_size)


def _builder(name: str) -> Callable[[int, int, int], nn.Module]:
    """The function of (in_channels, num_classes, image_size) behind a name."""
    if name.startswith("timm:"):
        raise UserError(f"--model {name} names a function", f"timm's models: --model {name.replace(':', '/', 1)}.")
    if ":" in name:
        return partial(_from_factory, load_object(name, "model"), name)
    if name in _SMALL:
        return _SMALL[name]
    if name in small.NAMES:
        return lambda channels, classes, _: small.resnet_cifar(name, channels, classes)
    import torchvision  # not above: 1.5 s, of which a launcher and our own models need nothing

    theirs: list[str] = torchvision.models.list_models(module=torchvision.models)
    if name in theirs:
        return partial(_from_torchvision, name)
    known = [*names(), *theirs]
    if importlib.util.find_spec("timm") is None:
        if name.startswith(_TIMM):
            raise UserError(f"model {name} needs timm, which is not installed", "pip install 'lockstep-torch[timm]'")
        raise unknown("model", name, known, "More names come with timm: pip install 'lockstep-torch[timm]'.")
    import timm

    bare = name.removeprefix(_TIMM)
    if timm.is_model(bare):
        return partial(_from_timm, bare)
    extra: list[str] = timm.list_models()
    raise unknown("model", bare, extra if bare != name else {*known, *extra}, "Or give package.module:factory.")


def _from_torchvision(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    import torchvision

    options: dict[str, Any] = {"num_classes": num_classes}
    if name in ("googlenet", "inception_v3"):  # the auxiliary heads would make the output a tuple in training
        options |= {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        options["image_size"] = image_size
    elif name.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
        if in_channels != 3:
            _adapt_first_conv(model, in_channels)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise _misfit(name, in_channels, image_size, error) from error
    require_fit(model, name, in_channels, image_size)
    return model


def require_fit(model: nn.Module, name: str, in_channels: int, image_size: int) -> None:
    """Raise UserError where the model that `build` made takes no images of another side.

    By the model's shapes alone, on the meta device: no arithmetic, no memory, no random draws.
    """
    state = {name: tensor.to("meta") for name, tensor in (*model.state_dict().items(), *model.named_buffers())}
    images = torch.empty(2, in_channels, image_size, image_size, device="meta")
    model.eval()
    try:
        with torch.no_grad():
            torch.func.functional_call(model, state, (images,))
    except NotImplementedError:  # an operator that has no shapes alone: the first pass will tell
        pass
    except (AssertionError, RuntimeError, ValueError) as error:
        raise _misfit(name, in_channels, image_size, error) from error
    model.train()


def _misfit(name: str, in_channels: int, image_size: int, error: Exception) -> UserError:
    return UserError(
        f"model {name} can't take {in_channels}x{image_size}x{image_size} images: {error}",
        "Give another --image-size (most models are made for 224), or another --model.",
    )


def _adapt_first_conv(model: nn.Module, in_channels: int) -> None:
    conv = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    weight = conv.weight.detach()  # [out, 3, kh, kw]
    if in_channels == 1:
        weight = weight.sum(1, keepdim=True)
    else:
        weight = weight[:, torch.arange(in_channels) % 3] * (3 / in_channels)
    conv.weight, conv.in_channels = nn.Parameter(weight), in_channels


def _from_timm(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    model = timm_model(name, image_size, pretrained=False, num_classes=num_classes, in_chans=in_channels)
    require_fit(model, name, in_channels, image_size)
    return model


def timm_model(name: str, image_size: int, **options: Any) -> nn.Module:
    """One of timm's models for images of a side, where it has to know."""
    import timm

    try:
        return timm.create_model(name, img_size=image_size, **options)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        return timm.create_model(name, **options)  # a convolutional model: takes any size


def _from_factory(factory: Any, name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    offered = {"in_channels": in_channels, "num_classes": num_classes, "image_size": image_size}
    if not callable(factory):
        raise UserError(f"model {name} is {with_article(factory)}, not a function", "Name a factory or a class.")
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some built-in callables have no signature
        parameters = {}.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if strange := [each for each in required if each not in offered]:
        raise UserError(
            f"model {name} wants {', '.join(strange)}, which nobody here knows",
            f"A factory may take {', '.join(offered)}, and whatever has a default.",
        )
    taken = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        taken.add("num_classes")  # as torchvision's builders take it
    model = factory(**{key: value for key, value in offered.items() if key in taken})
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model {name} returned {with_article(model)}, not an nn.Module",
            "The factory must return the model itself.",
        )
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):  # a blank pass in evaluation gives them shapes
        training = [module for module in model.modules() if module.training]
        with torch.no_grad():
            model.eval()(torch.zeros(2, in_channels, image_size, image_size))
        for module in training:
            module.training = True
    return model
