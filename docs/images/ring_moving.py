"""The ring of `ring.py` in motion: one step after the other in one place. Without motion it shows the start."""

from docs.images import ring
from docs.images.drawing import Sheet

WORDS = ring.WORDS


def draw(words: dict[str, str]) -> Sheet:
    """A frame a step."""
    sheet = Sheet(ring.FRAME_HEIGHT, words["title"], words["desc"])
    ring.legend(sheet, 256, 20, words)
    for step in range(2 * (ring.RANKS - 1) + 1):
        sheet.frame()
        ring.one_frame(sheet, 2, 8, words, step)
    return sheet
