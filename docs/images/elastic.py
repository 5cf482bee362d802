"""Three rounds of an elastic run: a member dies, a new one comes; each change is a new rendezvous."""

from docs.images.drawing import Sheet

LEFT, ROW, HIGH = 74, 40, 26
WORDS = {
    "en": {
        "title": "An elastic run in three rounds",
        "desc": "Time lines of four nodes. Round 0: nodes A, B and C meet, get ranks 0 to 2 and train. B dies; the others "
        "stop. Round 1: A and C meet again as ranks 0 and 1 and go on from the checkpoint. D comes. Round 2: A, C and D "
        "meet as ranks 0 to 2 and go on.",
        "node": "node {}",
        "round": "round {}: N = {}",
        "meet": "M",
        "dies": "dies",
        "comes": "comes",
        "lost": "lost",
        "legend1": "M: rendezvous, where members meet and get ranks",
        "legend2": "green bars: checkpoints; red: steps since the last one, done again",
    },
    "zh": {
        "title": "弹性训练的三轮",
        "desc": "四个节点的时间线。第 0 轮：A、B、C 汇合，得到 rank 0 到 2，开始训练。B 掉线，其余停下。"
        "第 1 轮：A 和 C 重新汇合，成为 rank 0 和 1，从检查点继续。D 加入。第 2 轮：A、C、D 汇合，rank 0 到 2，继续训练。",
        "node": "节点 {}",
        "round": "第 {} 轮：{} 个进程",
        "meet": "M",
        "dies": "掉线",
        "comes": "加入",
        "lost": "重做",
        "legend1": "M：rendezvous，成员在此汇合并得到 rank",
        "legend2": "绿色竖条：检查点；红色：上个检查点之后的步，要重做",
    },
}
# (left edge, world size, rank by node, units lost at the end)
ROUNDS = ((0, 3, {"A": 0, "B": 1, "C": 2}, 26), (138, 2, {"A": 0, "C": 1}, 14), (270, 3, {"A": 0, "C": 1, "D": 2}, 0))
LENGTH = 96  # of a round's training


def draw(words: dict[str, str]) -> Sheet:
    """Four rows of time."""
    sheet = Sheet(266, words["title"], words["desc"])
    for index, (left, size, ranks, lost) in enumerate(ROUNDS):
        x = LEFT + left
        sheet.text(x + 62, 22, words["round"].format(index, size), 12, kind="bold", fit=136)
        for row, node in enumerate("ABCD"):
            top = 36 + row * ROW
            if node not in ranks:
                continue
            sheet.cell(x, top, 22, HIGH, words["meet"], "yellow", 12)
            sheet.cell(x + 24, top, LENGTH, HIGH, "", "blue", 13)
            sheet.text(x + 30, top + 18, f"rank {ranks[node]}", 12, at="start")
            if lost:
                sheet.rect(x + 24 + LENGTH - lost, top, lost, HIGH, "red")
            for mark in (80, 98):
                if mark <= 24 + LENGTH - lost:
                    sheet.rect(x + mark - 2, top, 4, HIGH, "green", r=1)
    for row, node in enumerate("ABCD"):
        top = 36 + row * ROW
        sheet.text(12, top + 18, words["node"].format(node), 12, at="start", kind="faint")
        sheet.line((LEFT, top + HIGH + 6), (474, top + HIGH + 6), kind="dashed")
    sheet.text(LEFT + 126, 36 + ROW + 18, words["dies"], 12, at="start", kind="strong")
    sheet.text(LEFT + 264, 36 + 3 * ROW + 18, words["comes"], 12, at="end", kind="strong")
    sheet.text(12, 224, words["legend1"], 12, at="start", kind="faint")
    sheet.text(12, 248, words["legend2"], 12, at="start", kind="faint")
    return sheet
