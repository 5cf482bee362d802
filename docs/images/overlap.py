"""A step's time line, with one all-reduce after backward, and with a bucket's all-reduce as soon as it is full."""

from docs.images.drawing import Sheet

FORWARD, BACKWARD, SEND, UPDATE = 74, [38, 38, 38, 38], 26, 44  # units of time; gradients of four buckets
LEFT = 76
WORDS = {
    "en": {
        "title": "One step with and without overlap of communication and backward",
        "desc": "Without overlap, the network is idle during forward and backward, and the processor during the "
        "all-reduce of all gradients. With overlap, four buckets are sent one after the other while backward fills the "
        "next one; only the last one has to be waited for.",
        "without": "one all-reduce after backward",
        "with": "buckets: an all-reduce as soon as one is full",
        "compute": "compute",
        "network": "network",
        "forward": "forward",
        "backward": "backward",
        "all": "all-reduce",
        "update": "step",
        "saved": "saved",
        "wait": "waiting",
        "order": "Backward goes from the last layer to the first: bucket 0 holds the last layers.",
    },
    "zh": {
        "title": "通信与反向传播重叠与不重叠时的一步",
        "desc": "不重叠时，前向和反向期间网络空闲，all-reduce 全部梯度期间处理器空闲。"
        "重叠时，四个桶依次发送，同时反向传播填充下一个桶，只有最后一个桶需要等待。",
        "without": "反向结束后才 all-reduce",
        "with": "分桶：一个桶满了就开始 all-reduce",
        "compute": "计算",
        "network": "网络",
        "forward": "前向",
        "backward": "反向",
        "all": "all-reduce",
        "update": "更新",
        "saved": "省下",
        "wait": "等待",
        "order": "反向从最后一层算到第一层，所以 0 号桶里是最后几层的梯度。",
    },
}


def rows(sheet: Sheet, y: float, words: dict[str, str], title: str) -> None:
    """Two empty rows with their names."""
    sheet.text(12, y + 14, title, at="start", kind="bold")
    for row, name in enumerate(("compute", "network")):
        sheet.text(12, y + 46 + 36 * row, words[name], 13, at="start", fit=LEFT - 12)
        sheet.line((LEFT, y + 56 + 36 * row), (474, y + 56 + 36 * row), kind="dashed")


def draw(words: dict[str, str]) -> Sheet:
    """Both time lines on one scale."""
    sheet = Sheet(258, words["title"], words["desc"])
    rows(sheet, 6, words, words["without"])
    done = LEFT + FORWARD + sum(BACKWARD)
    end = done + SEND * len(BACKWARD)
    sheet.cell(LEFT, 34, FORWARD, 26, words["forward"], "blue", 13)
    sheet.cell(LEFT + FORWARD, 34, sum(BACKWARD), 26, words["backward"], "orange", 13)
    sheet.cell(done, 70, end - done, 26, words["all"], "green", 13)
    sheet.text((done + end) / 2, 51, words["wait"], 12, kind="faint", fit=end - done)
    sheet.cell(end, 34, UPDATE, 26, words["update"], "purple", 13)
    rows(sheet, 116, words, words["with"])
    sheet.cell(LEFT, 144, FORWARD, 26, words["forward"], "blue", 13)
    left, free = float(LEFT + FORWARD), 0.0
    for bucket, length in enumerate(BACKWARD):
        sheet.cell(left, 144, length, 26, str(bucket), "orange", 13)
        left += length
        free = max(free, left)  # the network takes one bucket after the other
        sheet.cell(free, 180, SEND, 26, str(bucket), "green", 13)
        free += SEND
    sheet.cell(free, 144, UPDATE, 26, words["update"], "purple", 13)
    sheet.line((end + UPDATE, 162), (free + UPDATE + 2, 162), arrow=True, kind="strong-stroke")
    sheet.text((free + end) / 2 + UPDATE, 154, words["saved"], 12, kind="strong")
    for index, line in enumerate(_wrapped(words["order"])):
        sheet.text(12, 228 + 18 * index, line, 12, at="start", kind="faint")
    return sheet


def _wrapped(text: str) -> list[str]:
    """A line, or two at the colon."""
    first, colon, rest = text.partition(": ")
    return [first + ":", rest] if colon else [text]
