"""A contact sheet: a row for each picture, as it is and in each epoch, by Pillow."""

from contextlib import suppress

from PIL import Image, ImageDraw, ImageFont

from lockstep.commands.preview.views import Views
from lockstep.inference.pictures import as_image

_CELL = (96, 256)  # pixels a side: smaller pictures are enlarged by whole numbers, larger ones shrunk
_GAP, _TEXT = 6, 14  # pixels
_LATIN = 0x24F  # the last of Unicode's Latin letters
_FONTS = (
    *("NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "DroidSansFallbackFull.ttf", "msyh.ttc", "PingFang.ttc"),
    *("Arial Unicode.ttf", "NotoSans-Regular.ttf", "DejaVuSans.ttf"),
)
_INK, _QUIET, _GROUND = "#1f2328", "#59636e", "#ffffff"
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def drawn(views: Views, caption: str) -> Image.Image:
    """The sheet as RGB."""
    height, width = views.before.shape[2:]
    factor = max(1, -(-_CELL[0] // max(height, width))) if max(height, width) <= _CELL[1] else 0
    scale = factor or _CELL[1] / max(height, width)
    cell = round(width * scale), round(height * scale)
    font = _font(f"{caption} {' '.join(views.titles)}")
    columns = ["as it is", *(f"epoch {epoch + 1}" for epoch in range(len(views.after)))]
    across = len(columns) * (cell[0] + _GAP) + 3 * _GAP
    about = _lines(caption, across - 2 * _GAP, font)
    top, row = (len(about) + 1) * (_TEXT + _GAP) + _GAP, cell[1] + _TEXT + 2 * _GAP
    size = across, top + len(views.titles) * row + _GAP
    sheet = Image.new("RGB", size, _GROUND)
    draw = ImageDraw.Draw(sheet)
    for line, text in enumerate(about):
        draw.text((_GAP, _GAP + line * (_TEXT + _GAP)), text, _INK, font)
    for column, title in enumerate(columns):
        x = _GAP + column * (cell[0] + _GAP) + (2 * _GAP if column else 0)  # what is not augmented stands apart
        draw.text((x, top - _TEXT - _GAP), _fitted(title, cell[0], font), _QUIET, font)
        pictures = views.after[column - 1] if column else views.before
        for line, picture in enumerate(pictures):
            how = Image.Resampling.NEAREST if factor else Image.Resampling.BOX
            sheet.paste(as_image(picture).resize(cell, how), (x, top + line * row + _TEXT + _GAP))
    for line, title in enumerate(views.titles):
        draw.text((_GAP, top + line * row), _fitted(title, size[0] - 2 * _GAP, font), _INK, font)
    return sheet


def _font(text: str) -> Font:
    """Pillow's own for Latin letters; for others the first of some fonts that the system has, if it has one."""
    if any(ord(letter) > _LATIN for letter in text):
        for name in _FONTS:
            with suppress(OSError):  # it is not installed
                return ImageFont.truetype(name, _TEXT)
    return ImageFont.load_default(_TEXT)


def _lines(text: str, width: int, font: Font) -> list[str]:
    """The text in lines of so many pixels at most, cut between words where that does."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        lines = [*lines[:-1], longer] if font.getlength(longer) <= width else [*lines, word]
    return [_fitted(line, width, font) for line in lines if line]


def _fitted(text: str, width: int, font: Font) -> str:
    """The text, cut where it is wider than so many pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."
