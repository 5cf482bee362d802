"""All-reduce by a tree of eight ranks: three steps of adding upwards, three of handing down."""

from docs.images.drawing import Sheet

RANKS, LEVELS = 8, 3
CELL, TOP, LEVEL = 42, 52, 62
WORDS = {
    "en": {
        "title": "All-reduce by a binary tree of eight ranks",
        "desc": "Upper half: in steps 1, 2 and 3 ranks send what they have to a neighbour 1, 2 and 4 ranks away, until "
        "rank 0 holds the sum of all eight. Lower half: in steps 4, 5 and 6 the sum goes back the same way.",
        "up": "reduce: sums go to rank 0",
        "down": "broadcast: the sum goes back",
        "step": "step",
        "rank": "rank",
    },
    "zh": {
        "title": "八个 rank 的树形 all-reduce",
        "desc": "上半部分：第 1、2、3 步，各 rank 依次把手里的和发给相距 1、2、4 的 rank，"
        "最后 rank 0 拿到八个 rank 的总和。"
        "下半部分：第 4、5、6 步，总和沿原路发回。",
        "up": "reduce：逐级相加，汇到 rank 0",
        "down": "broadcast：总和沿原路发回",
        "step": "步",
        "rank": "rank",
    },
}


def column(rank: int) -> float:
    """The middle of a rank's cell."""
    return 82 + rank * (CELL + 10) - 8


def half(sheet: Sheet, y: float, words: dict[str, str], up: bool) -> None:
    """Four rows of cells, and between two of them who sends to whom."""
    sheet.text(14, y + 16, words["up" if up else "down"], at="start", kind="bold")
    for row in range(LEVELS + 1):
        done = row if up else LEVELS - row  # levels of the tree below a rank's sum
        top = y + TOP + row * LEVEL
        for rank in range(RANKS):
            parts = 2 ** min(done, LEVELS if rank == 0 else (rank & -rank).bit_length() - 1)
            holds = f"{rank}" if parts == 1 else f"{rank}-{rank + parts - 1}"
            complete = parts == RANKS if up else rank % 2**done == 0
            word = holds if up else "0-7" if complete else ""
            colour = "green" if complete else "blue" if up and rank % 2**done == 0 else "grey"
            sheet.cell(column(rank) - CELL / 2, top, CELL, 26, word, colour, 13)
            if row == 0:
                sheet.text(column(rank), top - 8, str(rank), 12, kind="faint")
    for step in range(LEVELS):
        far = 2 ** (step if up else LEVELS - 1 - step)
        top = y + TOP + step * LEVEL + 26
        number = step + 1 + (0 if up else LEVELS)
        name = f"{words['step']} {number}" if words["step"] == "step" else f"第 {number} {words['step']}"
        sheet.text(26, top + 22, name, 12, kind="faint")
        for low in range(0, RANKS, 2 * far):
            ends = (column(low + far), top), (column(low), top + LEVEL - 26)
            if up:
                sheet.line(*ends, arrow=True)
            else:
                sheet.line((column(low), top), (column(low + far), top + LEVEL - 26), arrow=True)
    sheet.text(26, y + TOP - 8, words["rank"], 12, kind="faint")


def draw(words: dict[str, str]) -> Sheet:
    """Up and down."""
    sheet = Sheet(560, words["title"], words["desc"])
    half(sheet, 4, words, up=True)
    half(sheet, 284, words, up=False)
    return sheet
