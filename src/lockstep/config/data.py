"""Which images are learned from, how they are augmented, how often they come, and how those of a batch are mixed.

Sources of pictures by name: `table:FILE`, `hf:NAME`, `tv:NAME`, `shards:URL`, with options behind:
`table:FILE:label=breed`.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from lockstep.config.conflicts import check
from lockstep.config.fields import Arg, Floats, Part, Positive, require
from lockstep.errors import UserError, unknown

_Side = Annotated[int, Arg(least=0, most=8192)]  # pixels
_Channels = Annotated[Floats, Arg(unset="the set's, or those of --init pretrained")]
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of random crops: Szegedy et al., CVPR 2015, section 6


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how the training set is augmented."""

    dataset: str = "digits"
    """Data set; folder takes class folders of your own. digits, mnist, fashion-mnist, cifar10, cifar100, folder, or
    package.module:factory; a table by table:FILE.csv; torchvision's sets by tv:NAME, those of the datasets library by
    hf:NAME; webdataset's tar files by shards:FOLDER or shards:URL."""
    val_fraction: Annotated[float, Arg(least=0, below=1, unset="a fifth")] = 0.0
    """Part of it to validate on, where it has no val/. A hash of each picture's content chooses (0: a fifth)."""
    fraction: Annotated[float, Arg(above=0, most=1)] = 1.0
    """Train on this part of the set: a random subset by --seed, the same on any number of processes."""
    shuffle_window: Annotated[int, Arg(least=0)] = 0
    """Of shards: take them in random order, and shuffle the samples of so many at a time (0: of all)."""
    crop_padding: _Side = 0
    """Pad by this many pixels and crop at random (0: off)."""
    crop_fill: Literal["zero", "reflect"] = "zero"
    """What the padding holds: black, or the image mirrored at its edge."""
    flip: bool = False
    """Flip half of the images left to right."""
    alternate_flip: bool = False
    """Flip each image in every second epoch instead of at random; one half begins flipped, the other not."""
    cutout: _Side = 0
    """Blank a random square of this side, in pixels (0: off)."""
    augment: Annotated[tuple[str, ...], Arg(words=True, metavar="NAME[:VALUE,...] ...", unset="none")] = ()
    """torchvision's transforms, as randaugment:2,9. Its v2 transforms by name, as colorjitter:0.4,hue=0.1, or
    package.module:function: one after the other, before the other flags' crops, flips and cutout."""
    resized_crop: bool = False
    """Train on random crops of random scale and aspect (image folders)."""
    crop_scale: Floats = SCALE
    """Least and largest part of a picture's area that --resized-crop takes."""
    crop_ratio: Floats = RATIO
    """Least and largest ratio of width to height of its crops, before they are resized."""
    image_size: _Side = 0
    """Side of the images that the model sees, in pixels (0: as stored; 224 for pictures of many sizes)."""
    train_size: _Side = 0
    """Side of the images that it is trained on, where --image-size is for evaluation alone (0: the same)."""
    mean: _Channels = ()
    """Mean of each channel, of pixels from 0 to 1, that is subtracted."""
    std: _Channels = ()
    """Standard deviation of each channel, that is divided by."""
    crop_pct: Part = 0.0
    """Part of a photo's short side that evaluation keeps (0: 0.875, or that of --init pretrained)."""
    interpolation: Literal["auto", "bilinear", "bicubic"] = "auto"
    """How photos are resized (auto: bilinear, or as for --init pretrained)."""
    decode_size: _Side = 0
    """Turn photos upright and shrink them to this shorter side when they are read, in pixels (0: read as stored)."""
    skip_broken: bool = False
    """Leave out pictures that can't be decoded: all are tried before training, and the result is kept."""
    drop_last: bool = False
    """Leave out the short last batch of an epoch."""
    follow_links: bool = False
    """Follow symbolic links that lead out of the class folders."""

    @property
    def train_side(self) -> int:
        """The side of the images that the model is trained on, in pixels; 0: as stored."""
        return self.train_size or self.image_size

    def __post_init__(self) -> None:
        check(self)
        for name, usual, most in (("crop_scale", SCALE, 1.0), ("crop_ratio", RATIO, float("inf"))):
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            require(
                len(value) == 2 and 0 < value[0] <= value[1] <= most,
                f"{flag} {','.join(f'{number:g}' for number in value)} is no range",
                f"Give the least and the largest, as {flag} {'0.35,1' if usual is SCALE else '0.75,1.33'}.",
            )
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
        side = max(self.image_size or 224, self.train_size)
        require(
            self.decode_size == 0 or self.decode_size >= side,
            f"--decode-size {self.decode_size}: images of {side} pixels would be enlarged from it",
            f"Use {decode_size_for(side)} or more, or a smaller --image-size.",
        )


def decode_size_for(side: int) -> int:
    """The usual shorter side of stored photos for images of a side: 256 for 224."""
    return round(side * 256 / 224)


@dataclass(frozen=True)
class SamplesConfig:
    """How often samples come, and how they are mixed with each other."""

    balance: Literal["none", "equal", "sqrt"] = "none"
    """Draw all classes equally often, or as the square root of how many images they have."""
    aug_repeats: Positive = 1
    """Repeated augmentation: each image comes so many times in its batch, each augmented by itself; --batch-size counts
    all."""
    mixup: Annotated[float, Arg(least=0)] = 0.0
    """Mix pairs of images and their labels by mixup, with a part drawn from Beta(alpha, alpha) (0: off)."""
    cutmix: Annotated[float, Arg(least=0)] = 0.0
    """Exchange a box between pairs of images by CutMix, its area drawn from Beta(alpha, alpha) (0: off). Where --mixup
    is on too, half of the pairs each."""

    @property
    def mixes(self) -> bool:
        """True where samples are mixed at all."""
        return bool(self.mixup or self.cutmix)

    def for_batch(self, size: int) -> "SamplesConfig":
        """The same for a batch of any size, as a trial of one rank's batch has it: it may be odd, or a single image."""
        mixup, cutmix = (self.mixup, self.cutmix) if size > 1 else (0.0, 0.0)
        return replace(self, aug_repeats=1, mixup=mixup, cutmix=cutmix)

    def __post_init__(self) -> None:
        check(self)


KINDS = ("table", "hf", "tv", "shards")


def kind_of(dataset: str) -> str:
    """Which of the kinds a data set's name is of; empty for every other name."""
    kind, colon, _ = dataset.partition(":")
    return kind if colon and kind in KINDS else ""


def is_code(dataset: str) -> bool:
    """True for a name of the form package.module:factory."""
    return ":" in dataset and not kind_of(dataset)


def parse_source(dataset: str, options: Collection[str]) -> tuple[str, dict[str, str]]:
    """The name behind the kind, and the options behind the name: `hf:NAME:image=photo,label=breed`.
    Raises UserError for an empty name, and an option that the kind doesn't have, or that is empty.
    """
    kind, _, name = dataset.partition(":")
    before, colon, after = name.rpartition(":")
    given: dict[str, str] = {}
    if colon and "=" in after:
        name = before
        for part in after.split(","):
            key, _, value = part.partition("=")
            if key.strip() not in options:
                raise unknown(f"option of {kind}:", key.strip(), options, "A colon in a file's name begins options.")
            if not value.strip():
                raise UserError(f"--dataset {dataset}: {key.strip()} is empty", f"As {kind}:NAME:{key.strip()}=VALUE.")
            given[key.strip()] = value.strip()
    if not name.strip():
        raise UserError(
            f"--dataset {dataset} names nothing", f"As {kind}:{'photos.csv' if kind == 'table' else 'NAME'}."
        )
    return name, given
