"""The drawings of the concept pages: as their scripts draw them, legible, described, and shown in both languages."""

import importlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from docs.images.drawing import FILLS, INK, LANGUAGES, Sheet, draw, names, overlaps, width_of

ROOT = Path(__file__).parents[3]
_SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", names())
def test_a_script_draws_what_is_committed(name: str) -> None:
    for path, sheet in draw(name).items():
        assert path.read_text(encoding="utf-8") == sheet.svg(), f"python -m docs.images.drawing {name}"
        assert not overlaps(sheet)
        assert path.stat().st_size < 200_000
        tree = ElementTree.parse(path).getroot()
        assert (tree.find(f"{_SVG}title"), tree.find(f"{_SVG}desc")) != (None, None)
        assert min(float(text.attrib["font-size"]) for text in tree.iter(f"{_SVG}text")) >= 12


@pytest.mark.parametrize("name", names())
def test_pages_show_it_in_their_language(name: str) -> None:
    english, chinese = (
        "\n".join(page.read_text(encoding="utf-8") for page in folder.rglob("*.md") if (page.parts[-3] == "zh") == zh)
        for folder, zh in ((ROOT / "docs/concepts", False), (ROOT / "docs/zh/concepts", True))
    )
    assert re.search(rf"!\[[^\]]{{15,}}\]\([./]*images/{name}\.svg\)", english)
    assert re.search(rf"!\[[^\]]{{8,}}\]\([./]*images/{name}\.zh\.svg\)", chinese)


@pytest.mark.parametrize("name", names())
def test_both_languages_have_the_same_words_to_say(name: str) -> None:
    words = importlib.import_module(f"docs.images.{name}").WORDS
    assert list(words) == list(LANGUAGES)
    assert words["en"].keys() == words["zh"].keys()
    sheets = list(draw(name).values())
    assert re.search("[一-鿿]", sheets[1].title + sheets[1].desc)
    assert not re.search("[一-鿿]", "".join([sheets[0].title, sheets[0].desc, *(box[4] for box in sheets[0].boxes)]))


def _luminance(colour: str) -> float:
    """Relative luminance, as in WCAG 2.1."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("fill", FILLS)
def test_ink_stands_out_on_every_fill(fill: str) -> None:
    for dark in (0, 1):
        high, low = sorted((_luminance(INK[dark]), _luminance(FILLS[fill][dark])), reverse=True)
        assert (high + 0.05) / (low + 0.05) > 6


def test_words_that_run_out_or_overlap_would_be_seen() -> None:
    sheet = Sheet(50, "t", "d")
    with pytest.raises(ValueError, match="units wide"):
        sheet.cell(0, 0, 30, 20, "too long")
    with pytest.raises(ValueError, match="units wide"):
        sheet.text(475, 20, "out")
    sheet.text(100, 20, "one")
    sheet.text(110, 22, "two")
    assert overlaps(sheet) == [("one", "two")]
    assert width_of("字字", 14) == 28
