"""Which images are learned from, and how they are changed on the way."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.config.fields import require, require_at_least, require_finite

_LARGEST_SIDE = 8192  # pixels


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how the training set is augmented."""

    dataset: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, folder, or package.module:factory."""
    fraction: float = 1.0
    """Train on this part of the set: a random subset by --seed, the same on any number of processes."""
    crop_padding: int = 0
    """Pad by this many pixels and crop at random (0: off)."""
    crop_fill: Literal["zero", "reflect"] = "zero"
    """What the padding holds: black, or the image mirrored at its edge."""
    flip: bool = False
    """Flip half of the images left to right."""
    alternate_flip: bool = False
    """Flip each image in every second epoch instead of at random; one half begins flipped, the other not."""
    cutout: int = 0
    """Blank a random square of this side, in pixels (0: off)."""
    resized_crop: bool = False
    """Train on random crops of random scale and aspect (image folders)."""
    image_size: int = 0
    """Side of the images that the model sees, in pixels (0: as stored)."""
    drop_last: bool = False
    """Leave out the short last batch of an epoch."""
    follow_links: bool = False
    """Follow links that lead out of the class folders."""
    mixup: Annotated[float, arg(aliases=["--mixup-alpha"])] = 0.0
    """Mix pairs of images and their labels by mixup, with a part drawn from Beta(alpha, alpha) (0: off)."""
    cutmix: Annotated[float, arg(aliases=["--cutmix-alpha"])] = 0.0
    """Exchange a box between pairs of images by CutMix, its area drawn from Beta(alpha, alpha) (0: off)."""
    mix_prob: Annotated[float, arg(aliases=["--mixup-prob"])] = 1.0
    """The part of the pairs that --mixup and --cutmix mix."""
    mix_switch: Annotated[float, arg(aliases=["--mixup-switch-prob"])] = 0.5
    """With both on, the part of the mixed pairs that CutMix takes."""
    mix_off_epochs: int = 0
    """The last epochs, in which nothing is mixed."""

    def __post_init__(self) -> None:
        require(
            0 < self.fraction <= 1,
            f"--fraction {self.fraction} is not in (0, 1]",
            "Give the part of the training set to use, as 0.25.",
        )
        require_at_least(0, self, "crop_padding", "cutout", "image_size", "mixup", "cutmix", "mix_off_epochs")
        require_finite(self)
        for name in ("mix_prob", "mix_switch"):
            value, flag = getattr(self, name), name.replace("_", "-")
            require(0 <= value <= 1, f"--{flag} {value} is not in [0, 1]", "Give the part of the pairs, as 0.5.")
        for name in ("crop_padding", "cutout", "image_size"):
            value, flag = getattr(self, name), name.replace("_", "-")
            require(value <= _LARGEST_SIDE, f"--{flag} {value} is too large", f"Use {_LARGEST_SIDE:,} at most.")
