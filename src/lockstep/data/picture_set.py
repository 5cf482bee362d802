"""Sets of encoded pictures, decoded when they are read: where the bytes come from, and which crop the network sees."""

import hashlib
import math
import os
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from lockstep.config.data import RATIO, SCALE
from lockstep.data.decoding import HEIF_PACKAGE, decode, resized
from lockstep.data.image_sets import Array, Ids
from lockstep.errors import UserError, reason, shown
from lockstep.randomness import stream, uniform_np

_HEIF = (".heic", ".heif")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif", ".avif", *_HEIF)
DEFAULT_SIZE = 224
_ATTEMPTS = 10
_LARGEST = 1 << 26  # pixels that a whole picture may have after it is resized; of a larger one the centre alone is
_BROKEN = "Replace or remove what is broken, or leave out all of it with --skip-broken."
_SHOWN = 5  # empty files in a message


class Source(Protocol):
    """Where the encoded pictures of a set lie, by sample id. Must survive pickling, for loader workers."""

    def key(self, sample: int) -> str:
        """What a sample is called in the set: a path below its folder, a row's number."""

    def where(self, sample: int) -> str:
        """Where a picture is to be found, on one line."""

    def stat(self, sample: int) -> tuple[int | None, int, int, int]:
        """Bytes, times of change of content and status, inode: None and 0 where unknown. Raises OSError."""

    def read(self, sample: int) -> bytes:
        """The picture as it is stored. Raises OSError."""

    def take(self, ids: Ids) -> Self:
        """These samples alone, numbered in their order."""


class Files:
    """Files below one folder. Their paths are one object: a million strings would not stay shared between processes."""

    def __init__(self, root: Path, paths: Sequence[bytes]) -> None:
        self.root, self.name = root, shown(str(root))
        self.ends = np.cumsum([len(path) + 1 for path in paths], dtype=np.int64) - 1
        self.paths = b"".join(path + b"\0" for path in paths)

    def key(self, sample: int) -> str:
        """The path below the folder."""
        start = int(self.ends[sample - 1]) + 1 if sample else 0
        return os.fsdecode(self.paths[start : int(self.ends[sample])])

    def path(self, sample: int) -> Path:
        """The file of a sample."""
        return self.root / self.key(sample)

    def where(self, sample: int) -> str:
        """The path."""
        return shown(str(self.path(sample)))

    def stat(self, sample: int) -> tuple[int, int, int, int]:
        """Bytes, times of change of content and status, inode. Raises OSError."""
        found = self.path(sample).stat()
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino

    def read(self, sample: int) -> bytes:
        """The file's bytes. Raises OSError."""
        return self.path(sample).read_bytes()

    def take(self, ids: Ids) -> "Files":
        """These samples alone, numbered in their order."""
        return Files(self.root, [os.fsencode(self.key(sample)) for sample in ids.tolist()])


@dataclass(frozen=True, eq=False)
class PictureSet:
    """Encoded pictures, decoded when they are read.

    In training with `resized_crop` an image is a random crop, each draw a hash of (seed, epoch, sample id). Otherwise
    its short side becomes size / `crop_pct` and the centre is cut out. Resizing is antialiased. With
    `decode_size` every image is first turned upright by its EXIF orientation and shrunk to that shorter side; without
    it an orientation is not applied, as in the published recipes.
    """

    name: str
    classes: tuple[str, ...]
    labels: Ids  # int64 [n]
    source: Source
    size: int = DEFAULT_SIZE
    seed: int = 0
    resized_crop: bool = False
    crop_pct: float = 224 / 256  # of the short side, that evaluation keeps
    crop_scale: tuple[float, ...] = SCALE  # of random crops: part of the area, and
    crop_ratio: tuple[float, ...] = RATIO  # width / height
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # of ImageNet's training images, as published with torchvision's
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"
    decode_size: int = 0  # in pixels (0: whole, as stored)
    left_out: str = ""  # what in the folder is taken for no image, as "3 .txt, 1 .heic"
    cache: Any = None  # a cache.Cache of the pictures as they were decoded,
    rows: Ids | None = None  # int64 [n]: and there each sample's picture, if not the one of its number
    label_sets: Array | None = None  # bool [sets, classes] where a picture has several: see image_sets.py
    split: str = ""  # train, val or test, where the source has called it so, and nobody has chosen it by its name
    notes: tuple[str, ...] = ()  # what else a reader of the run's first lines should know of the set

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images as they are read."""
        return 3, self.size, self.size

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over classes, relative paths, sizes and labels (on first use: it looks at every file)."""
        digest = hashlib.sha256(repr(self.classes).encode("utf-8", "surrogatepass"))
        if self.label_sets is not None:
            digest.update(repr(self.label_sets.shape).encode() + self.label_sets.tobytes())
        empty = []
        for sample, label in enumerate(self.labels.tolist()):
            with self.naming(sample):
                size = self.source.stat(sample)[0]
            if size == 0:
                empty.append(sample)
            digest.update(repr((self.source.key(sample), size or 0, label)).encode("utf-8", "surrogatepass"))
        if empty:  # known without a look inside, so before the first step
            names = ", ".join(map(self.source.where, empty[:_SHOWN])) + (" and others" if len(empty) > _SHOWN else "")
            raise UserError(f"{len(empty):,} picture(s) of {self.name} are empty files: {names}", _BROKEN)
        if (content := getattr(self.source, "content", None)) is not None:  # of one without files of their own
            digest = hashlib.sha256(f"{digest.hexdigest()} {content}".encode())
        return digest.hexdigest()

    def take(self, ids: Ids, **changed: Any) -> Self:
        """The set of these samples, numbered in their order; `changed`: its other fields."""
        if self.cache is not None:
            changed.setdefault("rows", ids if self.rows is None else self.rows[ids])
        return replace(self, source=self.source.take(ids), labels=self.labels[ids], **changed)

    def where(self, sample: int) -> str:
        """A sample as messages name it."""
        return f"{self.source.where(sample)} (sample {sample})"

    @contextmanager
    def naming(self, sample: int) -> Iterator[None]:
        """Within, what the system refuses is a UserError that names a sample."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.where(sample)}: {error.strerror}", "Put it back, or remove it.") from error

    def read(self, ids: Ids, epoch: int | None = None, draws: Ids | None = None) -> tuple[Tensor, Tensor]:
        """Images uint8 [b, 3, size, size] and labels int64 [b]; epoch None: nothing random.

        `draws`: what each sample's draws are keyed by, where that is not its id: it may come several times.
        Raises UserError for a file that cannot be read or decoded, naming it and the sample id.
        """
        out = torch.empty(len(ids), *self.shape, dtype=torch.uint8)
        drawn = None
        if self.resized_crop and epoch is not None:
            count = 2 * _ATTEMPTS + 2
            keyed = (ids if draws is None else draws)[:, None] * 32 + np.arange(count)  # 32 > count: none is shared
            drawn = uniform_np(stream(self.seed, "resized-crop", epoch), keyed).tolist()
        for row, sample in enumerate(ids.tolist()):
            image = self.decoded(sample)
            if drawn is None:
                out[row] = centre_crop(image, self.size, self.crop_pct, self.interpolation)
            else:
                shape = image.shape[1], image.shape[2]
                top, left, height, width = crop_box(*shape, drawn[row], self.crop_scale, self.crop_ratio)
                box = image[:, top : top + height, left : left + width]
                out[row] = resized(box, self.size, self.size, self.interpolation)
        return out, torch.from_numpy(self.labels[ids])

    def fault(self, sample: int) -> str:
        """Why a picture can't be read; nothing where it can."""
        try:
            self.decoded(sample)
        except UserError as error:
            return error.message
        return ""

    def decoded(self, sample: int) -> Tensor:
        """A picture's pixels, uint8 [3, h, w]. Raises UserError, naming it."""
        if self.cache is not None:
            kept: Tensor = self.cache.picture(sample if self.rows is None else int(self.rows[sample]))
            return kept
        try:
            return decode(self.source.read(sample), self.decode_size)
        except Exception as error:  # whatever a decoder makes of a broken file
            raise UserError(f"{self.where(sample)} cannot be read as an image: {reason(error)}", _BROKEN) from error


def refused(message: str, remedy: str) -> UserError:
    """An error about files whose names may hold anything."""
    return UserError(shown(message), shown(remedy))


def user_cache(name: str) -> Path:
    """A folder below ~/.cache/lockstep, or below XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "lockstep" / name


def class_name(text: str) -> str:
    """A class's name as it is compared and shown: one of Unicode's forms, and what is not UTF-8 written out."""
    return unicodedata.normalize("NFC", os.fsencode(text).decode("utf-8", "backslashreplace"))


def require_decoders(images: PictureSet) -> None:
    """Raise UserError where a set holds files that nothing here can read: else some pictures would be missed late."""
    paths = images.source.paths.lower() if isinstance(images.source, Files) else b""
    found = sum(paths.count(ending.encode() + b"\0") for ending in _HEIF)
    if found and find_spec(HEIF_PACKAGE.replace("-", "_")) is None:
        what = f"{found:,} of {len(images):,} pictures of {images.name} are HEIC, and {HEIF_PACKAGE} is not installed"
        raise UserError(what, "pip install 'lockstep-torch[heif]', convert them, or take them out of the folder.")


def centre_crop(image: Tensor, size: int, crop_pct: float, interpolation: str = "bilinear") -> Tensor:
    """The centre [3, size, size] of an image whose short side is first resized to size / crop_pct, rounded."""
    short = round(size / crop_pct)
    height, width = image.shape[1:]
    scale = short / min(height, width)
    if short * scale * max(height, width) > _LARGEST:  # as of 1 x 12,000 pixels: what is cropped is not enlarged
        reach = math.ceil(size / 2 / scale) + 2 * math.ceil(max(1.0, 1 / scale))  # with what the filter sees beside it
        reach = max(reach, -(-min(height, width) // 2))  # the short side stays whole
        for dim, side in ((1, height), (2, width)):
            image = image.narrow(dim, max(0, side // 2 - reach), min(side, 2 * reach + side % 2))
        height, width = image.shape[1:]
    # whole pixels, the long side rounded down as torchvision's Resize does
    height, width = (short if side == min(height, width) else int(side * scale) for side in (height, width))
    image = resized(image, height, width, interpolation)
    top, left = round((height - size) / 2), round((width - size) / 2)
    return image[:, top : top + size, left : left + size]


def crop_box(
    height: int, width: int, draws: Sequence[float], scale: Sequence[float] = SCALE, ratios: Sequence[float] = RATIO
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop, by torchvision's RandomResizedCrop.

    draws: 22 numbers in [0, 1): area and aspect ratio of up to ten attempts, then the place. Where no attempt fits,
    the largest centred crop with an allowed ratio.
    """
    low, high = math.log(ratios[0]), math.log(ratios[1])
    for attempt in range(_ATTEMPTS):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[2 * attempt])
        ratio = math.exp(low + (high - low) * draws[2 * attempt + 1])
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(draws[-2] * (height - h + 1)), int(draws[-1] * (width - w + 1)), h, w
    h, w = max(1, min(height, round(width / ratios[0]))), max(1, min(width, round(height * ratios[1])))
    return (height - h) // 2, (width - w) // 2, h, w
