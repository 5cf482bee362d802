"""Names of classes and files in pictures, in the letters of any script: which of this machine's fonts has them.

Pillow takes one font: `draw_text` changes it.
"""

import os
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import shown

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

    Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_NO_LETTER = "\U0010fffe"  # no font has it: what is drawn in its place is the box of a missing letter
_ENDINGS = (".ttf", ".ttc", ".otf", ".otc")
_NOTED = 5  # names in a note


@dataclass(frozen=True)
class Lettering:
    """Names as a picture can show them.

    Attributes:
        names: letters with their marks in one, as "\u00fc"; a name of which no font has all letters is "picture 3".
        fonts: to draw by with Pillow, the picture's own first, then those for letters which that lacks.
        note: which names were replaced and why; empty where all could be drawn.
    """

    names: list[str]
    fonts: "list[Font]"
    note: str = ""


def lettering(names: Sequence[str], size: int) -> Lettering:
    """What a picture needs to show these names in a size."""
    from PIL import ImageFont

    own = ImageFont.load_default(size)
    names = [unicodedata.normalize("NFC", shown(name)) for name in names]
    files, missing = _fonts_for("".join(sorted(_lacking(own, set("".join(names))))))
    fonts = [own, *(ImageFont.truetype(path, size) for path in files)]
    hidden = [number for number, name in enumerate(names) if missing & set(name)]
    if not hidden:
        return Lettering(names, fonts)
    drawn = [f"picture {number + 1}" if number in set(hidden) else name for number, name in enumerate(names)]
    which = ", ".join(f"{drawn[number]} is {names[number]}" for number in hidden[:_NOTED])
    more = f" and {len(hidden) - _NOTED} more" if len(hidden) > _NOTED else ""
    note = f"no font of this machine has all letters of {len(hidden)} of {len(names)} names: {which}{more}"
    return Lettering(drawn, fonts, f"{note} (on Debian: apt install fonts-noto)")


def _lacking(font: "Font", letters: set[str]) -> set[str]:
    """Those of the letters that a font has no shape for."""
    box = _shape(font, _NO_LETTER)
    visible = (letter for letter in letters if unicodedata.category(letter) not in ("Zs", "Cf"))
    return {letter for letter in visible if _shape(font, letter) == box}


def _shape(font: "Font", letter: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(letter)
    return mask.size, bytes(mask)


@lru_cache
def _fonts_for(letters: str) -> tuple[tuple[str, ...], set[str]]:
    """The first of the machine's fonts that have these letters, and the letters that none has."""
    from PIL import ImageFont

    files, missing = [], set(letters)
    for path in _installed() if letters else ():
        if not missing:
            break
        with suppress(OSError, ValueError):  # no font, a damaged one, or one of bitmaps in another size
            lacking = _lacking(ImageFont.truetype(path, 14), missing)
            if lacking < missing:
                files.append(path)
                missing = lacking
    return tuple(files), missing


def _folders() -> list[Path]:
    """Where systems keep their fonts: the user's own first."""
    shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    data = [os.environ.get("XDG_DATA_HOME") or "~/.local/share", *shared.split(":")]
    fixed = ["~/.fonts", "~/Library/Fonts", "/Library/Fonts", "/System/Library/Fonts"]
    return [Path(folder).expanduser() for folder in (*(f"{each}/fonts" for each in data), *fixed)]


def _installed() -> Iterator[str]:
    """Font files, upright ones without serifs and of usual weight first, as text in pictures is best read."""
    files = {Path(folder, name) for top in _folders() for folder, _, names in os.walk(top) for name in names}

    def order(path: Path) -> tuple[bool, bool, Path]:
        name = path.name.lower()
        odd = any(word in name for word in ("bold", "italic", "oblique", "light", "thin", "black", "mono", "condensed"))
        return odd, "serif" in name and "sans" not in name, path

    return map(str, sorted((path for path in files if path.suffix.lower() in _ENDINGS), key=order))


def draw_text(
    draw: "ImageDraw.ImageDraw", place: tuple[float, float], text: str, colour: str, fonts: Sequence["Font"]
) -> None:
    """Draw a text by Pillow, its middle at a place's height, each letter by the first font that has it."""
    x, y = place
    for font, part in _parts(text, fonts):
        draw.text((x, y), part, colour, font, anchor="lm")
        x += font.getlength(part)


def text_width(text: str, fonts: Sequence["Font"]) -> float:
    """How many pixels wide `draw_text` draws it."""
    return sum(font.getlength(part) for font, part in _parts(text, fonts))


def _parts(text: str, fonts: Sequence["Font"]) -> list[tuple["Font", str]]:
    """A text's parts, each with the font that has its letters; spaces and marks go with what is before them.

    One part where one font has all: so text from right to left keeps its order.
    """
    lacks = [_lacking(font, set(text)) for font in fonts]
    if set() in lacks:
        return [(fonts[lacks.index(set())], text)]
    places, last = [], 0
    for letter in text:
        if letter in lacks[last] or unicodedata.category(letter)[0] == "L":
            last = next((k for k, missing in enumerate(lacks) if letter not in missing), 0)
        places.append(last)
    numbered = groupby(zip(places, text, strict=True), key=lambda each: each[0])
    return [(fonts[place], "".join(letter for _, letter in group)) for place, group in numbered]
