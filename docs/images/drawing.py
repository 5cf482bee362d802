"""A sheet to draw on, for the pictures of the concept pages: `python -m docs.images.drawing [NAME ...]` draws them all.

A picture is a file of this folder with WORDS (by language, name -> text) and `draw(words) -> Sheet`; it becomes
NAME.svg and NAME.zh.svg. Colours stand in classes, so a page may be light or dark; a sheet is 480 units wide and no
letter smaller than 12, so a phone 360 pixels wide still shows it at 8. What would run out of its place is an error.
"""

import importlib
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH = 480
SECONDS = 2.0  # that a frame of an animation is seen
LANGUAGES = {"en": ".svg", "zh": ".zh.svg"}
FONT = 'system-ui,"PingFang SC","Microsoft YaHei","Noto Sans CJK SC","WenQuanYi Zen Hei",sans-serif'
# class -> (on a light page, on a dark page); fills are weak enough for ink on top
FILLS = {
    "blue": ("#bcdcf5", "#1f4e73"),
    "orange": ("#ffd8a6", "#7a4a10"),
    "green": ("#bfe6c9", "#1e5c36"),
    "purple": ("#e2cbef", "#583a6c"),
    "red": ("#f8c6bf", "#7c2f28"),
    "yellow": ("#fdf0ae", "#5f5512"),
    "grey": ("#e3e5e8", "#3b4148"),
    "page": ("#fcfcfa", "#16191d"),
}
INK, FAINT, STRONG = ("#1f2328", "#e8e8e8"), ("#59626c", "#a6b0ba"), ("#b3261e", "#ff8a7d")
_HEAD = 'markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse"'
_NARROW, _WIDE = frozenset(" iljtfrI.,:;'|!()[]-·"), frozenset("mwMW@%→←+=×")


def width_of(text: str, size: float) -> float:
    """At most how wide a text gets in common sans-serif fonts, in units."""
    ems = {"narrow": 0.37, "wide": 0.92, "other": 0.63, "full": 1.0}
    kinds = (
        "full" if ord(c) > 0x2E80 else "narrow" if c in _NARROW else "wide" if c in _WIDE else "other" for c in text
    )
    return size * sum(ems[kind] for kind in kinds)


class Sheet:
    """An SVG in the making. Lengths in units, from the upper left corner."""

    def __init__(self, height: float, title: str, desc: str, width: float = WIDTH) -> None:
        self.height, self.width, self.title, self.desc = height, width, title, desc
        self.parts: list[str] = []
        self.boxes: list[tuple[float, float, float, float, str, int]] = []  # of texts; the last is the frame's number
        self.frames = 0

    def rect(self, x: float, y: float, w: float, h: float, fill: str = "grey", line: bool = True, r: float = 4) -> None:
        """A rectangle; `fill` names a colour."""
        assert fill in FILLS, fill
        edge = " edge" if line else ""
        self.parts.append(f'<rect class="{fill}{edge}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}"/>')

    def text(
        self, x: float, y: float, words: str, size: float = 14, at: str = "middle", kind: str = "ink", fit: float = 0
    ) -> None:
        """Words with their baseline at y. `at`: which part of them is at x (start, middle, end); `fit`: room for them.

        Raises:
            ValueError: where the words are wider than `fit` or leave the sheet.
        """
        wide = width_of(words, size) * (1.1 if kind == "bold" else 1)
        left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[at]
        if (fit and wide > fit) or left < 0 or left + wide > self.width or y > self.height:
            raise ValueError(f"{words!r} at {x:g}, {y:g}: {wide:.0f} units wide, of {fit or self.width:g}")
        self.boxes.append((left, y - size * 0.8, left + wide, y + size * 0.2, words, self.frames))
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{at}"'
        self.parts.append(f'<text class="{kind}" {place}>{escape(words)}</text>')

    def cell(self, x: float, y: float, w: float, h: float, words: str, fill: str = "grey", size: float = 14) -> None:
        """A rectangle with a word in its middle."""
        self.rect(x, y, w, h, fill)
        if words:
            self.text(x + w / 2, y + h / 2 + size * 0.36, words, size, fit=w)

    def line(self, *points: tuple[float, float], arrow: bool = False, kind: str = "stroke") -> None:
        """A line through points; with `arrow` it has a head. `kind`: stroke, faint-stroke, strong-stroke, dashed."""
        path = " ".join(f"{'ML'[i > 0]}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(f'<path class="{kind}" d="{path}"{head}/>')

    def frame(self) -> None:
        """Begin the next picture of an animation; the ones before are hidden while it shows."""
        self.parts.append(("</g>" if self.frames else "") + f'<g class="frame f{self.frames}">')
        self.frames += 1

    def svg(self) -> str:
        """The file's text."""
        body = "\n".join(self.parts) + ("\n</g>" if self.frames else "")
        wide, high = self.width, self.height
        size = f'viewBox="0 0 {wide:g} {high:g}" width="{wide * 1.25:g}" height="{high * 1.25:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">\n'
            f'<title id="title">{escape(self.title)}</title>\n<desc id="desc">{escape(self.desc)}</desc>\n'
            f"<style>\n{_style(0)}\n@media (prefers-color-scheme: dark) {{\n{_style(1)}\n}}\n{self._motion()}</style>\n"
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" {_HEAD} orient="auto">'
            '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
            f'<rect class="page" width="{wide:g}" height="{high:g}" rx="8"/>\n{body}\n</svg>\n'
        )

    def _motion(self) -> str:
        if not self.frames:
            return ""
        part, whole = 100 / self.frames, SECONDS * self.frames
        begins = [i * SECONDS - whole * (i > 0) for i in range(self.frames)]
        rules = [
            ".frame { opacity: 0; }\n.f0 { opacity: 1; }",
            f"@keyframes show {{ 0%, {part:.4f}% {{ opacity: 1; }} {part + 0.01:.4f}%, 100% {{ opacity: 0; }} }}",
            "@media (prefers-reduced-motion: no-preference) {",
            f".frame {{ animation: show {whole:g}s linear infinite; }}",
            *(f".f{i} {{ animation-delay: {begin:g}s; }}" for i, begin in enumerate(begins)),
            "}",
        ]
        return "\n".join(rules) + "\n"


def _style(dark: int) -> str:
    lines = [f".{name} {{ fill: {colours[dark]}; }}" for name, colours in FILLS.items()]
    ink, faint, strong = INK[dark], FAINT[dark], STRONG[dark]
    return "\n".join(
        [
            f"text {{ font-family: {FONT}; }}" if not dark else "",
            *lines,
            f".edge {{ stroke: {faint}; stroke-width: 1; }}",
            f".ink, .tip {{ fill: {ink}; }} .faint {{ fill: {faint}; }} .strong {{ fill: {strong}; }}",
            f".bold {{ fill: {ink}; font-weight: bold; }}",
            f".stroke {{ stroke: {ink}; stroke-width: 1.5; fill: none; }}",
            f".faint-stroke {{ stroke: {faint}; stroke-width: 1; fill: none; }}",
            f".strong-stroke {{ stroke: {strong}; stroke-width: 2.5; fill: none; }}",
            f".dashed {{ stroke: {faint}; stroke-width: 1; fill: none; stroke-dasharray: 4 3; }}",
        ]
    ).lstrip("\n")


def overlaps(sheet: Sheet) -> list[tuple[str, str]]:
    """Pairs of texts of one frame that touch each other."""
    found = []
    for i, (left, top, right, bottom, words, frame) in enumerate(sheet.boxes):
        for left2, top2, right2, bottom2, words2, frame2 in sheet.boxes[:i]:
            seen_at_once = frame == frame2 or 0 in (frame, frame2)  # what comes before all frames shows in each
            if seen_at_once and left < right2 and left2 < right and top < bottom2 and top2 < bottom:
                found.append((words2, words))
    return found


def names() -> list[str]:
    """The pictures that scripts of this folder draw: those with WORDS."""
    return sorted(path.stem for path in HERE.glob("*.py") if "\nWORDS" in path.read_text(encoding="utf-8"))


def draw(name: str) -> dict[Path, Sheet]:
    """File -> picture, one a language."""
    module = importlib.import_module(f"docs.images.{name}")
    words: Mapping[str, dict[str, str]] = module.WORDS
    return {HERE / f"{name}{end}": module.draw(words[language]) for language, end in LANGUAGES.items()}


def main(wanted: list[str]) -> None:
    """Write the pictures of these names, or of all."""
    for name in wanted or names():
        for path, sheet in draw(name).items():
            path.write_text(sheet.svg(), encoding="utf-8")
            print(path.name, *overlaps(sheet))


if __name__ == "__main__":
    main(sys.argv[1:])
