"""What the report's page looks like (page.css), and the little that it does by itself (page.js)."""

from pathlib import Path

from lockstep.commands.report.runs import MOST_RUNS
from lockstep.commands.shared.page import COLOURS

_FILES = Path(__file__).parent


def style() -> str:
    """The page's own rules; nothing of a run is in them. Beyond the palette colours come again."""
    light, dark = COLOURS["light"], COLOURS["dark"]
    colours = (
        f".run-{k} {{ --run: light-dark({light[k % len(light)]}, {dark[k % len(dark)]}); }}\n"
        f":root:has(#show-{k}:not(:checked)) .run-{k}:not(.switch) {{ display: none; }}\n"
        for k in range(MOST_RUNS)
    )
    along = (
        f":root:has(#along-{name}:checked) .chart:not(.by-{name}) {{ display: none; }}\n"
        for name in ("step", "epoch", "time")
    )
    return "".join((*colours, *along)) + (_FILES / "page.css").read_text(encoding="utf-8")


def script() -> str:
    """A readout of curves, a remembered theme, copy buttons."""
    return (_FILES / "page.js").read_text(encoding="utf-8")
