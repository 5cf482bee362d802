"""`lockstep preview`: a picture of what the network sees, before and after augmentation."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.commands.shared.arguments import planned
from lockstep.config import Config, DataConfig
from lockstep.config.fields import Arg, check_fields, flags_of, require
from lockstep.errors import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import Image
    from torch import Tensor

    from lockstep.commands.shared.fonts import Font
    from lockstep.data.image_sets import ImageSet

_WHICH = ("dataset", "fraction", "val_fraction", "drop_last", "skip_broken", "follow_links")  # and not how they look
_CELL = (96, 256)  # pixels a side: smaller pictures are enlarged by whole numbers, larger ones shrunk
_GAP, _TEXT = 6, 14  # pixels
_INK, _QUIET, _GROUND = "#1f2328", "#59636e", "#ffffff"
_UpTo100 = Annotated[int, Arg(least=1, most=100)]


@dataclass(frozen=True)
class Preview:
    """What `lockstep preview` takes beside the flags of a run."""

    out: str = "preview.png"
    """The picture to write; one that is there is written over."""
    samples: _UpTo100 = 6
    """Pictures to show, a row each: the first ones of the run."""
    views: _UpTo100 = 5
    """Epochs to show them in, a column each."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("out",)})

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.out.lower().endswith(".png"), f"--out {self.out} is no .png", "Name a file, as preview.png.")


@dataclass(frozen=True)
class Views:
    """Pictures of one size, normalising undone."""

    titles: tuple[str, ...]  # class and sample id of each row
    before: "Tensor"  # uint8 [n, C, H, W], with nothing random
    after: "Tensor"  # uint8 [epochs, n, C, H, W]


def main(args: list[str]) -> int:
    """Draw what the network sees."""
    about = "Draw what the network sees by the recipe {}: some pictures as they are, and in several epochs."
    draw(planned("preview", lambda config: Preview(config=config), args, about, takes_run=True))
    return 0


def draw(chosen: Preview) -> None:
    """Write the picture, and say what it shows."""
    from lockstep.distributed.files import whole_file
    from lockstep.distributed.output import for_people
    from lockstep.training.run_folder import check

    check(chosen.config)
    seen, path = views(chosen.config, chosen.samples, chosen.views), Path(chosen.out)
    sheet, note = drawn(seen)
    with whole_file(path) as temporary:
        sheet.save(temporary, "PNG")
    height, width = seen.before.shape[2:]
    first = f"{path}: {len(seen.titles)} pictures of {width}x{height}, as they are and in {chosen.views} epoch(s)"
    for line in (first, f"  {_settings(chosen.config.data)}", *(f"  {title}" for title in seen.titles), note):
        if line:
            print(for_people(line, sys.stdout))


def _settings(data: DataConfig) -> str:
    """What changes the pictures, as flags."""
    flags = [
        " ".join(flag.words(value))
        for name, flag in flags_of(DataConfig).items()
        if (value := getattr(data, name)) != flag.default and name not in _WHICH
    ]
    return " ".join(flags) or "nothing is changed"


def views(config: Config, samples: int, epochs: int) -> Views:
    """The run's first pictures, in this process and by the run's own loader.

    What mixes pictures of a batch with each other comes after this, and is not shown.
    """
    import numpy as np
    import torch

    from lockstep.data.image_sets import file_of, label_name
    from lockstep.distributed.world import World
    from lockstep.training.assemble import load_data, train_loader

    config, world = config.with_execution(device="cpu", workers=0, cache=""), World.single()  # to fill one takes hours
    images, _ = load_data(config, world)
    train = train_loader(config, images, world)
    order = train.order
    ids = np.concatenate([order.step(0, t) for t in range(min(len(train), -(-samples // order.batch_size)))])[:samples]
    pixels, labels, numbers = next(iter(train.read([(ids, None)])))
    seen = [train.augment(pixels, numbers, None)]
    for stored, _, numbers in train.read([(ids, epoch) for epoch in range(epochs)]):
        seen.append(train.augment(stored, numbers, len(seen) - 1))
    pictures = _stored(torch.stack(seen), images, normalised=pixels.dtype != torch.uint8)
    numbered = zip(labels.tolist(), (ids % len(images)).tolist(), strict=True)
    titles = [shown(f"{label_name(images, label)} ({file_of(images, n) or n})") for label, n in numbered]
    return Views(tuple(titles), pictures[0], pictures[1:])


def _stored(pictures: "Tensor", images: "ImageSet", normalised: bool) -> "Tensor":
    """uint8 of what the network takes, [..., C, H, W]; from darkest to brightest where a set has it `normalised`."""
    import torch

    if normalised:
        low, high = pictures.min(), pictures.max()
        pictures = (pictures - low) / (high - low).clamp(min=1e-12)
    else:
        mean, std = (torch.tensor(values)[:, None, None] for values in (images.mean, images.std))
        pictures = pictures * std + mean
    return (pictures * 255).round().clamp(0, 255).to(torch.uint8)


def drawn(views: Views) -> tuple["Image.Image", str]:
    """A contact sheet, RGB: a row for each picture, as it is and in each epoch; and which titles it can't show."""
    from PIL import Image, ImageDraw

    from lockstep.commands.shared.fonts import draw_text, lettering
    from lockstep.inference.pictures import as_image

    height, width = views.before.shape[2:]
    factor = max(1, -(-_CELL[0] // max(height, width))) if max(height, width) <= _CELL[1] else 0
    scale = factor or _CELL[1] / max(height, width)
    cell = round(width * scale), round(height * scale)
    letters = lettering(views.titles, _TEXT)
    fonts = letters.fonts
    columns = ["as it is", *(f"epoch {epoch + 1}" for epoch in range(len(views.after)))]
    across = len(columns) * (cell[0] + _GAP) + 3 * _GAP
    top, row = _TEXT + 2 * _GAP, cell[1] + _TEXT + 2 * _GAP
    sheet = Image.new("RGB", (across, top + len(views.titles) * row + _GAP), _GROUND)
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(columns):
        x = _GAP + column * (cell[0] + _GAP) + (2 * _GAP if column else 0)  # what is not augmented stands apart
        draw_text(draw, (x, top - _TEXT / 2 - _GAP), _fitted(title, cell[0], fonts), _QUIET, fonts)
        pictures = views.after[column - 1] if column else views.before
        for line, picture in enumerate(pictures):
            how = Image.Resampling.NEAREST if factor else Image.Resampling.BOX
            sheet.paste(as_image(picture).resize(cell, how), (x, top + line * row + _TEXT + _GAP))
    for line, title in enumerate(letters.names):
        place = _GAP, top + line * row + _TEXT / 2
        draw_text(draw, place, _fitted(title, across - 2 * _GAP, fonts), _INK, fonts)
    return sheet, letters.note


def _fitted(text: str, width: int, fonts: "Sequence[Font]") -> str:
    """The text, cut where it is wider than so many pixels."""
    from lockstep.commands.shared.fonts import text_width

    if text_width(text, fonts) <= width:
        return text
    while text and text_width(f"{text}...", fonts) > width:
        text = text[:-1]
    return f"{text}..."
