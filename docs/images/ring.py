"""All-reduce by a ring of four ranks, step by step: what each rank's chunks hold, and which one it passes on."""

from docs.images.drawing import Sheet

RANKS = 4
CELL, ROW, GAP = 44, 24, 10  # a chunk's width and height, and the way between two ranks
FRAME_WIDTH, FRAME_HEIGHT = 232, 168
WORDS = {
    "en": {
        "title": "Ring all-reduce of four ranks in six steps",
        "desc": "Seven pictures. Each rank has four chunks. In three steps of reduce-scatter every rank passes one "
        "chunk to its right neighbour, which adds it; then each rank owns one complete sum. In three steps of "
        "all-gather the complete chunks travel round.",
        "start": "start: each rank its own",
        "reduce": "reduce-scatter, step",
        "gather": "all-gather, step",
        "rank": "rank",
        "complete": "complete sum",
        "sent": "just received",
        "letters": "a b c d: the parts of ranks 0 1 2 3",
        "chunk": "rows: chunks 0 to 3",
    },
    "zh": {
        "title": "四个 rank 的环形 all-reduce，共六步",
        "desc": "七幅图。每个 rank 有四块数据。reduce-scatter 三步："
        "每个 rank 把一块传给右边的邻居，由它加上；之后每个 rank 手里有一块完整的和。"
        "all-gather 三步：完整的块沿环传一圈。",
        "start": "开始：各有各的数据",
        "reduce": "reduce-scatter，第",
        "gather": "all-gather，第",
        "rank": "rank",
        "complete": "完整的和",
        "sent": "刚收到",
        "letters": "a b c d：rank 0 1 2 3 的数据",
        "chunk": "每行一块：0 到 3",
    },
}
Held = list[list[str]]  # [rank][chunk] -> whose parts are in it


def states() -> list[tuple[Held, dict[int, int]]]:
    """What ranks hold after each step, and by rank the chunk that just came (empty at the start)."""
    held = [["abcd"[rank]] * RANKS for rank in range(RANKS)]
    found: list[tuple[Held, dict[int, int]]] = [([list(row) for row in held], {})]
    for step in range(2 * (RANKS - 1)):
        adding = step < RANKS - 1
        # rank r passes on the chunk that it has just received; it begins with its own number
        sent = {rank: (rank - step + (0 if adding else RANKS)) % RANKS for rank in range(RANKS)}
        parts = {rank: held[rank][chunk] for rank, chunk in sent.items()}
        came = {}
        for rank, chunk in sent.items():
            right = (rank + 1) % RANKS
            held[right][chunk] = "".join(sorted(held[right][chunk] + parts[rank])) if adding else parts[rank]
            came[right] = chunk
        found.append(([list(row) for row in held], came))
    return found


def one_frame(sheet: Sheet, x: float, y: float, words: dict[str, str], step: int) -> None:
    """Draw the state after a step, its caption above."""
    held, came = states()[step]
    phase, number = ("reduce", step) if step < RANKS else ("gather", step - RANKS + 1)
    caption = f"{words[phase]} {number}{' 步' if '第' in words[phase] else ''}" if step else words["start"]
    sheet.text(x + 24, y + 14, caption, at="start", kind="bold", size=13, fit=FRAME_WIDTH - 26)
    for rank in range(RANKS):
        left = x + 24 + rank * (CELL + GAP)
        sheet.text(left + CELL / 2, y + 34, f"{words['rank']} {rank}", size=12, kind="faint")
        for chunk in range(RANKS):
            top = y + 42 + chunk * (ROW + 3)
            full = len(held[rank][chunk]) == RANKS
            new = came.get(rank) == chunk
            sheet.cell(left, top, CELL, ROW, held[rank][chunk], "orange" if new else "green" if full else "grey", 13)
            if new:
                sheet.line((left - GAP - 1, top + ROW / 2), (left + 1, top + ROW / 2), arrow=True)
                if rank == 0:  # the ring closes: from the last rank's right side
                    end = x + 24 + RANKS * (CELL + GAP) - GAP
                    sheet.line((end, top + ROW / 2), (end + GAP - 3, top + ROW / 2), kind="stroke")
    for chunk in range(RANKS):
        sheet.text(x + 7, y + 58 + chunk * (ROW + 3), str(chunk), size=12, kind="faint")


def legend(sheet: Sheet, x: float, y: float, words: dict[str, str]) -> None:
    """What letters and colours mean, in 100 units of height."""
    sheet.text(x, y + 14, words["letters"], size=12, at="start", fit=FRAME_WIDTH)
    sheet.text(x, y + 36, words["chunk"], size=12, at="start", fit=FRAME_WIDTH)
    for row, (colour, name) in enumerate((("orange", "sent"), ("green", "complete"))):
        sheet.cell(x, y + 50 + 28 * row, CELL, 20, "", colour)
        sheet.text(x + CELL + 8, y + 65 + 28 * row, words[name], size=12, at="start", fit=FRAME_WIDTH - CELL)


def draw(words: dict[str, str]) -> Sheet:
    """All steps, two in a row."""
    steps = 2 * (RANKS - 1) + 1
    sheet = Sheet(FRAME_HEIGHT * ((steps + 1) // 2) + 8, words["title"], words["desc"])
    for step in range(steps):
        one_frame(sheet, 2 + 240 * (step % 2), 8 + FRAME_HEIGHT * (step // 2), words, step)
    legend(sheet, 256, 8 + FRAME_HEIGHT * (steps // 2), words)
    return sheet
