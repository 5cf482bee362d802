"""Published weights of torchvision's and timm's models: names, files, and what images they were made with."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.errors import UserError, reason, unknown

ASKED = "pretrained"
_TIMM = "timm/"
_UNTRAINED = ("aux1.", "aux2.", "AuxLogits.")  # heads that our googlenet and inception_v3 are built without
_DENSE = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:weight|bias|running_mean|running_var))$")


@dataclass(frozen=True)
class Weights:
    """Weights that somebody has published, and what images they were made with."""

    library: str  # torchvision or timm
    model: str  # as the library calls it, without a tag
    tag: str
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    size: int  # side of the images, in pixels
    crop_pct: float  # of the short side, that evaluation keeps
    interpolation: Literal["bilinear", "bicubic"]
    classes: int
    licence: str
    url: str = ""
    repository: str = ""  # of the Hugging Face hub

    def __str__(self) -> str:
        where = self.repository or self.url
        return f"{self.library} {self.model}.{self.tag} ({where}); licence: {self.licence}"

    @property
    def files(self) -> tuple[str, ...]:
        """Names that their file may have among torch.hub's: first that of a download, whose checksum is known."""
        if self.repository:
            return tuple(f"{self.model}.{self.tag}{ending}" for ending in (".safetensors", ".bin", ".pth"))
        name = self.url.rpartition("/")[2]
        return name, f"{Path(name).stem}.safetensors"

    @property
    def checksum(self) -> str:
        """How the SHA-256 of the file behind `url` begins; empty where nobody has said."""
        found = re.search(r"-([0-9a-f]{8,64})\.\w+$", self.url)
        return found[1] if found else ""


def tag_of(model: str) -> str:
    """The tag of a name as resnet18.a1_in1k, which means one of timm's sets of weights; else nothing."""
    return "" if ":" in model else model.partition(".")[2]


def find(model: str, tag: str = "") -> Weights:
    """The weights of a model by `--model`'s name, those that its library takes by itself, or those of a tag.
    Raises UserError for a model that nobody has published weights of, and for an unknown tag.
    """
    own = tag_of(model)
    if own and tag and own != tag:
        raise UserError(f"--model {model} with --init {ASKED}:{tag}: two sets of weights", "Leave one of the tags out.")
    if ":" not in model:
        import torchvision

        if model in torchvision.models.list_models(module=torchvision.models):
            return _of_torchvision(model, tag)
        from lockstep.models import check, names

        check(model)
        if model not in names():
            return _of_timm(model.removeprefix(_TIMM).removesuffix(f".{own}" if own else ""), own or tag)
    raise UserError(
        f"--init {ASKED}: nobody has published weights of {model}",
        "Name one of torchvision's or timm's models by --model, or a file of your own by --init FILE.",
    )


def _of_torchvision(model: str, tag: str) -> Weights:
    from torchvision.models import get_model_weights

    known: Any = get_model_weights(model)
    if tag and tag not in known.__members__:
        raise unknown(f"weights of {model}", tag, known.__members__)
    found = known[tag] if tag else known.DEFAULT
    how = found.transforms()
    mean, std, size = tuple(how.mean), tuple(how.std), how.crop_size[0]
    if model in ("googlenet", "inception_v3"):  # torchvision's models map ImageNet's statistics to these by themselves
        mean = std = (0.5, 0.5, 0.5)
    return Weights(
        library="torchvision",
        model=model,
        tag=found.name,
        mean=mean,
        std=std,
        size=size,
        crop_pct=size / how.resize_size[0],
        interpolation="bilinear" if how.interpolation.value == "bilinear" else "bicubic",
        classes=len(found.meta["categories"]),
        licence=found.meta.get("license", "torchvision states none"),
        url=found.url,
    )


def _of_timm(model: str, tag: str) -> Weights:
    import timm

    tags = [name.partition(".")[2] for name in timm.list_pretrained(f"{model}.*")] or [""]
    if tag and tag not in tags:
        raise unknown(f"weights of {model}", tag, tags)
    found: Any = timm.get_pretrained_cfg(f"{model}.{tag}" if tag else model)
    if found is None or not (found.hf_hub_id or found.url):
        raise UserError(
            f"--init {ASKED}: timm has no weights of {model}", "Name another model, or a file by --init FILE."
        )
    size = found.input_size[1]
    return Weights(
        library="timm",
        model=model,
        tag=found.tag or "default",
        mean=tuple(found.mean),
        std=tuple(found.std),
        size=size,
        crop_pct=size / math.floor(size / found.crop_pct),  # the whole pixels that timm resizes to
        interpolation="bilinear" if found.interpolation == "bilinear" else "bicubic",
        classes=found.num_classes,
        licence=found.license or "timm states none",
        url=found.url or "",
        repository=found.hf_hub_id or "",
    )


def converted(weights: Weights, found: dict[str, Tensor], in_channels: int, image_size: int) -> dict[str, Tensor]:
    """The published tensors by the names, and at the size, that the model has as we build it; the head as published.
    Raises UserError where they are not the model's.
    """
    if weights.library == "timm":
        return _by_timm(weights, found, in_channels, image_size)
    found = {name: tensor for name, tensor in found.items() if not name.startswith(_UNTRAINED)}
    if weights.model.startswith("densenet"):  # written by names of before 2018
        found = {"".join(m.groups()) if (m := _DENSE.match(name)) else name: t for name, t in found.items()}
    if weights.model.startswith("vit_") and image_size != weights.size and "encoder.pos_embedding" in found:
        from torchvision.models.vision_transformer import interpolate_embeddings

        patch = found["conv_proj.weight"].shape[-1]
        found = dict(interpolate_embeddings(image_size, patch, found))
    return found


def _by_timm(weights: Weights, found: dict[str, Tensor], in_channels: int, image_size: int) -> dict[str, Tensor]:
    """Through a model of timm's with its own head, which knows old names, other sizes and other colours."""
    from lockstep.models import timm_model

    options: dict[str, Any] = {
        "pretrained": True,
        "pretrained_cfg_overlay": {"state_dict": found, "hf_hub_id": None},
        "num_classes": weights.classes,
        "in_chans": in_channels,
    }
    name = f"{weights.model}.{weights.tag}" if weights.tag != "default" else weights.model
    try:
        model = timm_model(name, image_size, **options)
    except (RuntimeError, KeyError, ValueError) as error:
        what = f"the file of {name} does not fit timm's {weights.model}: {reason(error)}"
        raise UserError(what, "Download it again.") from error
    with torch.no_grad():
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
