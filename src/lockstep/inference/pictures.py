"""Pictures that nobody labelled: found, read, and brought to the size that a model was trained on."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.checkpoint.weights import Card
from lockstep.data.decoding import decode, packed, resized, short_side_to, shrunk
from lockstep.data.folders import image_files
from lockstep.data.image_sets import Ids
from lockstep.data.picture_set import EXTENSIONS, centre_crop
from lockstep.distributed.files import named
from lockstep.errors import UserError, refusal

READ, BROKEN = 0, 1


@dataclass(frozen=True, eq=False)
class ForCard:
    """What the image sets of a trained model share: what its card says."""

    card: Card
    name: str  # for messages
    fingerprint: str
    classes: tuple[str, ...] = field(init=False)
    shape: tuple[int, int, int] = field(init=False)  # channels, height and width, as they were in training
    mean: tuple[float, ...] = field(init=False)
    std: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        for key in ("classes", "shape", "mean", "std"):
            object.__setattr__(self, key, getattr(self.card, key))


@dataclass(frozen=True, eq=False)
class Pictures(ForCard):
    """Files as an image set for `EvalLoader`, whose "label" says whether a file could be read (READ or BROKEN)."""

    paths: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, ids: Ids, epoch: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Images uint8 [b, C, H, W], black where a file is broken, and READ or BROKEN, int64 [b]."""
        images = torch.zeros(len(ids), *self.shape, dtype=torch.uint8)
        state = np.full(len(ids), READ)
        for row, sample in enumerate(ids.tolist()):
            try:
                images[row] = fitted(self.paths[sample], self.card)
            except UserError:  # asked for again where it is reported: `fault`
                state[row] = BROKEN
        return images, torch.from_numpy(state)

    def fault(self, sample: int) -> str:
        """Why a broken file can't be read."""
        try:
            fitted(self.paths[sample], self.card)
        except UserError as error:
            return error.message
        return f"{self.paths[sample]} could not be read a moment ago"


def fitted(picture: Any, card: Card) -> Tensor:
    """A picture as its model wants it before normalisation: uint8 [C, H, W].

    As evaluation treated the images of the training: upright and shrunk, if that was asked for by --decode-size; the
    short side resized to height / crop_pct, then the centre; to a shape that is no square the whole picture is resized.

    Args:
        picture: a path, a file's bytes, a PIL image, or uint8 [3, h, w].

    Raises:
        UserError: for what can't be read as a picture, or a model whose images had neither one nor three channels.
    """
    image = _pixels(picture, card.decode_size)
    channels, height, width = card.shape
    if tuple(image.shape[1:]) != (height, width) or card.crop_pct < 1:
        how = card.interpolation
        image = (
            centre_crop(image, height, card.crop_pct, how) if height == width else resized(image, height, width, how)
        )
    if channels == 1:
        return torch.from_numpy(np.array(as_image(image).convert("L")))[None]
    if channels != 3:
        raise UserError(f"{card.model} was trained on images of {channels} channels, and pictures have 1 or 3", "")
    return image


def _pixels(picture: Any, decode_size: int) -> Tensor:
    if isinstance(picture, Tensor):
        if picture.ndim != 3 or picture.shape[0] != 3 or picture.dtype != torch.uint8:
            raise UserError(f"a picture is uint8 [3, h, w], not {picture.dtype} {list(picture.shape)}", "")
        return packed(resized(picture, *short_side_to(decode_size, *picture.shape[1:]))) if decode_size else picture
    if hasattr(picture, "convert"):  # PIL's
        if decode_size:
            return shrunk(picture, decode_size)
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
    if isinstance(picture, bytes):
        return decode(picture, decode_size)
    try:
        return decode(Path(picture).read_bytes(), decode_size)
    except Exception as error:  # whatever a decoder makes of a broken file
        raise UserError(
            f"{picture} can't be read as an image: {refusal(error)}", "Replace or remove the file."
        ) from error


def find(names: Iterable[str], follow_links: bool = False) -> tuple[str, ...]:
    """The files that names of files and folders mean; a folder's in the order of its classes and paths.
    Raises UserError for a name that is nothing, and a folder without an image.
    """
    found: list[str] = []
    for name in names:
        path = named(name)
        if path.is_dir():
            inside = sorted(image_files(path, follow_links), key=lambda file: (file.split("/")[0], file))
            if not inside:
                raise UserError(f"{path} holds no image", f"Images end in {', '.join(EXTENSIONS)}.")
            found += [str(path / file) for file in inside]
        elif path.is_file():
            found.append(str(path))
        else:
            raise UserError(f"there is no picture or folder {path}", "Check the name.")
    return tuple(found)


def as_image(pixels: Tensor) -> Image.Image:
    """Pixels [C, H, W] as RGB: one channel in grey, more than three by their first three.

    What is not uint8 is shown from its darkest to its brightest value.
    """
    if pixels.dtype != torch.uint8:
        low, high = pixels.min(), pixels.max()
        pixels = ((pixels - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    channels = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(channels.permute(1, 2, 0).contiguous().cpu().numpy())
