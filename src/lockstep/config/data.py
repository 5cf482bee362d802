"""Which images are learned from, and how they are changed on the way."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import arg

from lockstep.config.fields import Calls, Floats, require, require_at_least, require_finite, split_spaces

_LARGEST_SIDE = 8192  # pixels


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how the training set is augmented."""

    dataset: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, folder, or package.module:factory; a table by table:FILE.csv;
    torchvision's sets by tv:NAME, those of the datasets library by hf:NAME."""
    val_fraction: float = 0.0
    """Validate on this part of a set that has no validation part: by a hash of each picture's content (0: off)."""
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
    augment: Annotated[Calls, arg(help_behavior_hint="(default: none)")] = ()
    """torchvision's v2 transforms by name, as randaugment:2,9 colorjitter:0.4,hue=0.1, or package.module:function: one
    after the other, before the other flags' crops, flips and cutout."""
    resized_crop: bool = False
    """Train on random crops of random scale and aspect (image folders)."""
    crop_scale: Floats = (0.08, 1.0)
    """Least and largest part of a picture's area that --resized-crop takes."""
    crop_ratio: Floats = (3 / 4, 4 / 3)
    """Least and largest ratio of width to height of its crops, before they are resized."""
    image_size: int = 0
    """Side of the images that the model sees, in pixels (0: as stored)."""
    train_size: int = 0
    """Side of the images that it is trained on, where --image-size is for evaluation alone (0: the same)."""
    mean: Annotated[Floats, arg(help_behavior_hint="(default: the set's, or those of --init pretrained)")] = ()
    """Mean of each channel, of pixels from 0 to 1, that is subtracted."""
    std: Annotated[Floats, arg(help_behavior_hint="(default: the set's, or those of --init pretrained)")] = ()
    """Standard deviation of each channel, that is divided by."""
    crop_pct: float = 0.0
    """Part of a photo's short side that evaluation keeps (0: 0.875, or that of --init pretrained)."""
    interpolation: Literal["auto", "bilinear", "bicubic"] = "auto"
    """How photos are resized (auto: bilinear, or as for --init pretrained)."""
    decode_size: int = 0
    """Turn photos upright and shrink them to this shorter side when they are read, in pixels (0: read as stored)."""
    skip_broken: bool = False
    """Leave out pictures that can't be decoded: all are tried before training, and what came of it is kept."""
    drop_last: bool = False
    """Leave out the short last batch of an epoch."""
    follow_links: bool = False
    """Follow links that lead out of the class folders."""

    @property
    def is_divisible(self) -> bool:
        """True for a set of pictures as they are stored, of which a part can be chosen by what they hold."""
        return self.dataset == "folder" or self.dataset.startswith(("table:", "hf:", "tv:"))

    @property
    def train_side(self) -> int:
        """The side of the images that the model is trained on, in pixels; 0: as stored."""
        return self.train_size or self.image_size

    def __post_init__(self) -> None:
        require(
            0 < self.fraction <= 1,
            f"--fraction {self.fraction} is not in (0, 1]",
            "Give the part of the training set to use, as 0.25.",
        )
        require_finite(self)
        self._require_crops()
        given: Any = self.augment
        listed = split_spaces(given) if isinstance(given, str) else tuple(given)
        object.__setattr__(self, "augment", listed)  # one text, or a list, as a loop of one's own may give it
        for spec in self.augment:
            require(
                spec and spec == "".join(spec.split()),
                f"--augment {spec!r} is empty or holds a space",
                "Give NAME or NAME:VALUE,NAME=VALUE, a value for each transform.",
            )
        require(
            len(self.mean) == len(self.std) and all(each > 0 for each in self.std),
            f"--mean {self.mean} and --std {self.std} are not a mean and a positive deviation for each channel",
            "Give both, as --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5.",
        )
        require(0 <= self.crop_pct <= 1, f"--crop-pct {self.crop_pct} is not in (0, 1]", "A usual value is 0.875.")
        require(
            0 <= self.val_fraction < 1,
            f"--val-fraction {self.val_fraction} is not in [0, 1)",
            "Give the part of the images to validate on, as 0.1.",
        )
        require_at_least(0, self, "crop_padding", "cutout", "image_size", "train_size", "decode_size")
        for name in ("crop_padding", "cutout", "image_size", "train_size", "decode_size"):
            value, flag = getattr(self, name), name.replace("_", "-")
            require(value <= _LARGEST_SIDE, f"--{flag} {value} is too large", f"Use {_LARGEST_SIDE:,} at most.")
        require(
            self.train_size == 0 or self.image_size > 0,
            f"--train-size {self.train_size} without --image-size",
            "Give the side of the images in evaluation as well, as --image-size 224.",
        )
        seen = max(self.image_size or 224, self.train_size)
        require(
            self.decode_size == 0 or self.decode_size >= seen,
            f"--decode-size {self.decode_size}: images of {seen} pixels would be enlarged from it",
            f"Use {round(seen * 256 / 224)} or more, or a smaller --image-size.",
        )

    def _require_crops(self) -> None:
        """Raise UserError for ranges of random crops that are none."""
        for name, most in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            require(
                len(value) == 2 and 0 < value[0] <= value[1] <= most,
                f"{flag} {','.join(f'{number:g}' for number in value)} is no range"
                + (" of parts of a picture" if name == "crop_scale" else ""),
                f"Give the least and the largest, as {flag} {'0.35,1' if name == 'crop_scale' else '0.75,1.33'}.",
            )
            usual = type(self).__dataclass_fields__[name].default
            require(self.resized_crop or value == usual, f"{flag} without --resized-crop changes nothing", "Give both.")
