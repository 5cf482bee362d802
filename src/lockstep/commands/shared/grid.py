"""Tables of plain text: a line a row, as wide as they need be, and no wider than the terminal where there is one."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from lockstep.errors import shown

_GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column's heading and texts. `spare`: the column with the highest number is left out first; 0: never."""

    title: str
    texts: Sequence[str]
    spare: int = 0
    left: bool = False  # texts begin at its left edge

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", [shown(text) for text in self.texts])

    @property
    def width(self) -> int:
        """In cells of a terminal, of which a Chinese character takes two."""
        return max(map(cell_len, [self.title, *self.texts]))


def terminal_width() -> int | None:
    """Columns of the terminal, or of $COLUMNS where a pipe or file stands for it; None: no limit."""
    columns = shutil.get_terminal_size((0, 0)).columns
    return columns if columns > 0 else None if not sys.stdout.isatty() else 80


def fitted(columns: Sequence[Column], width: int | None) -> tuple[list[str], list[str]]:
    """The table's lines, its heading first, and the titles of the columns that had to be left out.

    Where the columns that must stay are still too wide, the first one's texts are cut in their middle.
    """
    visible, left_out = list(columns), []
    while width is not None and _total(visible) > width and any(column.spare for column in visible):
        first = max(visible, key=lambda column: column.spare)
        visible.remove(first)
        left_out.append(first.title)
    widths = [column.width for column in visible]
    if width is not None and (over := _total(visible) - width) > 0:
        widths[0] = max(8, widths[0] - over)
    rows = zip(*([column.title, *column.texts] for column in visible), strict=True)
    return [
        _GAP.join(
            _cell(text, size, column.left) for text, size, column in zip(row, widths, visible, strict=True)
        ).rstrip()
        for row in rows
    ], left_out


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def cut(text: str, size: int) -> str:
    """A text, cut in its middle where it takes more than so many cells."""
    if cell_len(text) <= size:
        return text
    half = (size - 1) // 2
    end = text[-(size - 1 - half) :]
    while cell_len(end) > size - 1 - half:  # of wide characters there is room for fewer
        end = end[1:]
    return f"{set_cell_size(text, half)}\N{HORIZONTAL ELLIPSIS}{end}"


def _cell(text: str, size: int, left: bool) -> str:
    text = cut(text, size)
    room = " " * (size - cell_len(text))
    return text + room if left else room + text
