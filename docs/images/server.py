"""Four ranks add their gradients: through one server, and round a ring; the numbers are bytes in each direction."""

from docs.images.drawing import Sheet

WORDS = {
    "en": {
        "title": "Bytes on the links: one parameter server and a ring",
        "desc": "Left: rank 0 is the server; ranks 1, 2 and 3 each send it a gradient of n bytes and get n bytes back, so "
        "its own link carries 3 n in each direction. Right: in a ring of four every link carries one and a half n.",
        "server": "one parameter server",
        "ring": "ring all-reduce",
        "n": "n",
        "busiest": "busiest link: 3 n in, 3 n out",
        "even": "every link: 1.5 n in, 1.5 n out",
        "general": "for N ranks: (N - 1) n",
        "general_ring": "for N ranks: 2 (N - 1) / N n",
        "is_server": "server",
    },
    "zh": {
        "title": "链路上的字节数：单个参数服务器与环",
        "desc": "左图：rank 0 是服务器，rank 1、2、3 各发给它 n 字节的梯度，再收回 n 字节，所以它自己的链路每个方向要传 3 n。"
        "右图：四个 rank 的环里，每条链路传 1.5 n。",
        "server": "单个参数服务器",
        "ring": "环形 all-reduce",
        "n": "n",
        "busiest": "最忙的链路：进 3 n，出 3 n",
        "even": "每条链路：进 1.5 n，出 1.5 n",
        "general": "N 个 rank：(N - 1) n",
        "general_ring": "N 个 rank：2 (N - 1) / N n",
        "is_server": "服务器",
    },
}


def draw(words: dict[str, str]) -> Sheet:
    """Two networks side by side."""
    sheet = Sheet(286, words["title"], words["desc"])
    sheet.text(120, 24, words["server"], kind="bold")
    sheet.rect(86, 44, 68, 44, "red")
    sheet.text(120, 62, "rank 0", 13)
    sheet.text(120, 80, words["is_server"], 12, kind="faint", fit=68)
    for rank in (1, 2, 3):
        middle = 46 + 74 * (rank - 1)
        sheet.cell(middle - 30, 186, 60, 28, f"rank {rank}", "blue", 13)
        top = 120 + (rank - 2) * 22
        sheet.line((middle - 5, 184), (top - 5, 92), arrow=True, kind="stroke")
        sheet.line((top + 5, 92), (middle + 5, 184), arrow=True, kind="stroke")
        sheet.text({1: 50, 2: 138, 3: 190}[rank], {1: 128, 2: 158, 3: 128}[rank], words["n"], 13)
    sheet.text(360, 24, words["ring"], kind="bold")
    corners = {0: (300, 58), 1: (420, 58), 2: (420, 200), 3: (300, 200)}
    for rank, (x, y) in corners.items():
        sheet.cell(x - 30, y - 14, 60, 28, f"rank {rank}", "green", 13)
    sheet.line((332, 58), (388, 58), arrow=True)
    sheet.line((420, 74), (420, 184), arrow=True)
    sheet.line((388, 200), (332, 200), arrow=True)
    sheet.line((300, 184), (300, 74), arrow=True)
    for x, y in ((360, 50), (440, 134), (360, 192), (278, 134)):
        sheet.text(x, y, "1.5 n", 12)
    for x, first, second, kind in ((120, "busiest", "general", "strong"), (360, "even", "general_ring", "ink")):
        sheet.text(x, 246, words[first], 13, kind=kind, fit=236)
        sheet.text(x, 270, words[second], 13, kind="faint", fit=236)
    return sheet
