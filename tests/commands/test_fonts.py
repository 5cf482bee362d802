"""Names in pictures: any script's letters by the fonts that are there, and by number where none has them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageDraw

from lockstep.commands.preview import Views, drawn
from lockstep.commands.shared import fonts

NAMES = ("cat", "Bl\u00fcte", "u\u0308ber", "\u732b", "\u0e41\u0e21\u0e27")  # the last two: Chinese, Thai


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder with fonts of the system: empty."""
    monkeypatch.setattr(fonts, "_folders", lambda: [tmp_path])
    fonts._fonts_for.cache_clear()
    yield tmp_path
    fonts._fonts_for.cache_clear()


def make_font(path: Path, letters: str) -> None:
    """A font in which a letter is a triangle as high as its place in `letters`; a box for what it lacks."""
    names = {ord(letter): f"g{place}" for place, letter in enumerate(letters)}
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    glyphs = {}
    for place, name in enumerate([".notdef", *names.values()]):
        pen = TTGlyphPen(None)
        high = 800 - 30 * place
        pen.moveTo((0, 0))
        for corner in ((0, high), (600, high), (600, 0)) if name == ".notdef" else ((300, high), (600, 0)):
            pen.lineTo(corner)
        pen.closePath()
        glyphs[name] = pen.glyph()
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(dict.fromkeys(glyphs, (700, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": f"Made {path.stem}", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


def sheet(names: tuple[str, ...] = NAMES) -> tuple[str, np.ndarray]:
    pictures = torch.zeros(len(names), 1, 8, 8, dtype=torch.uint8)
    picture, note = drawn(Views(names, pictures, pictures[None]))
    return note, np.asarray(picture.convert("L"))


@pytest.mark.usefixtures("folder")
def test_a_name_that_no_font_has_is_drawn_by_number_and_told() -> None:
    note, by_name = sheet()
    assert "picture 4 is \u732b, picture 5 is \u0e41\u0e21\u0e27" in note
    assert "\n" not in note
    told, by_number = sheet(tuple(fonts.lettering(NAMES, 14).names))
    assert not told
    assert np.array_equal(by_name, by_number)


def test_fonts_of_the_system_are_found_for_the_letters_that_are_lacking(folder: Path) -> None:
    _, without = sheet()
    fonts._fonts_for.cache_clear()
    make_font(folder / "one.ttf", "\u732b\u00fc")
    make_font(folder / "Bold.ttf", "\u732b\u0e41")  # of \u732b the other one is better to read
    make_font(folder / "two.ttf", "\u0e41\u0e21\u0e27" + "Blteber")
    (folder / "broken.otf").write_bytes(b"no font")
    found = fonts.lettering(NAMES, 14)
    assert found.names == ["cat", "Bl\u00fcte", "\u00fcber", "\u732b", "\u0e41\u0e21\u0e27"]
    assert [Path(str(font.path)).name for font in found.fonts[1:]] == ["one.ttf", "two.ttf"]
    note, pixels = sheet()
    assert not note
    assert pixels.shape != without.shape or not np.array_equal(pixels, without)


def test_pillow_draws_each_letter_by_the_first_font_that_has_it(folder: Path) -> None:
    make_font(folder / "one.ttf", "\u732b")
    both = fonts.lettering(("a\u732bb",), 14).fonts
    own = both[0]
    assert [(both.index(font), part) for font, part in fonts._parts("a \u732b b", both)] == [
        (0, "a "), (1, "\u732b "), (0, "b"),
    ]  # fmt: skip
    assert fonts.text_width("a\u732bb", both) == own.getlength("ab") + both[1].getlength("\u732b")
    picture = Image.new("L", (60, 20), "white")
    fonts.draw_text(ImageDraw.Draw(picture), (0, 10), "\u732b", "black", both)
    filled = np.asarray(picture) < 128
    assert 10 < filled.sum() < 0.7 * filled.any(0).sum() * filled.any(1).sum(), "a triangle, not a box"
