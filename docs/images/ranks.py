"""Two nodes of four processes: rank, local rank, node rank, and a process group across the nodes."""

from docs.images.drawing import Sheet

NODES, LOCAL = 2, 4
WORDS = {
    "en": {
        "title": "Two nodes with four processes each: world size 8",
        "desc": "Each node is a box with four processes, each with a GPU. Node 0 has ranks 0 to 3, node 1 ranks 4 to 7; "
        "on both the local ranks are 0 to 3. Ranks 0 and 4 are framed together as a process group of their own.",
        "node": "node {}, node rank {}",
        "group": "a process group of two: ranks 0 and 4, which there are 0 and 1",
        "formula": "rank = node rank * 4 + local rank = 0 ... world size - 1",
        "world": "the default group: all 8 processes, world size 8",
        "local": "local rank",
    },
    "zh": {
        "title": "两个节点，每个四个进程：world size 为 8",
        "desc": "每个节点是一个方框，里面有四个进程，各用一块 GPU。节点 0 上是 rank 0 到 3，节点 1 上是 rank 4 到 7；"
        "两个节点上的 local rank 都是 0 到 3。rank 0 和 rank 4 另外组成一个进程组。",
        "node": "节点 {}，node rank {}",
        "group": "另建的进程组：rank 0 和 4，在组内编号为 0 和 1",
        "formula": "rank = node rank * 4 + local rank = 0 ... world size - 1",
        "world": "默认进程组：全部 8 个进程，world size = 8",
        "local": "local rank",
    },
}


def draw(words: dict[str, str]) -> Sheet:
    """The world."""
    sheet = Sheet(352, words["title"], words["desc"])
    sheet.text(14, 24, words["world"], at="start", kind="bold")
    for node in range(NODES):
        top = 38 + node * 130
        sheet.rect(8, top, 464, 120, "grey", r=8)
        sheet.text(462, top + 20, words["node"].format(node, node), 13, at="end")
    sheet.rect(14, 66, 116, 222, "purple", r=8)
    for node in range(NODES):
        for local in range(LOCAL):
            left, top = 20 + local * 114, 72 + node * 130
            sheet.rect(left, top, 104, 78, "blue" if node == 0 else "green", r=6)
            sheet.text(left + 52, top + 22, f"rank {node * LOCAL + local}", 15, kind="bold")
            sheet.text(left + 52, top + 44, f"{words['local']} {local}", 13, fit=104)
            sheet.text(left + 52, top + 65, f"GPU {local}", 13, kind="faint")
    sheet.line((72, 288), (72, 302), kind="faint-stroke")
    sheet.text(14, 317, words["group"], 13, at="start")
    sheet.text(14, 340, words["formula"], 13, at="start", kind="faint")
    return sheet
