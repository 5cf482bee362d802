"""Schedules of a pipeline of four stages, as examples/concepts/pipeline_bubble.py plays them."""

from docs.images.drawing import Sheet
from examples.concepts.pipeline_bubble import Op, gpipe, one_forward_one_backward, play

STAGES, BATCHES, UNIT, HIGH, LEFT = 4, 4, 28, 24, 74
WORDS = {
    "en": {
        "title": "Four stages: without micro-batches, GPipe, and one forward one backward",
        "desc": "Three schedules. The whole batch at once: one stage works at a time, 75 percent idle. GPipe with four "
        "micro-batches: all forward passes, then all backward ones, 43 percent idle. One forward, one backward: as long, "
        "but a stage holds fewer micro-batches.",
        "one": "the whole batch at once: {} idle",
        "gpipe": "GPipe, 4 micro-batches: {} idle, {} held",
        "1f1b": "1F1B, 8 micro-batches: {} idle, {} held",
        "stage": "stage {}",
        "legend": "blue: forward, orange: backward, each one unit of time",
    },
    "zh": {
        "title": "四个阶段：不切批、GPipe、一前一反（1F1B）",
        "desc": "三种调度。整批一次通过：同一时刻只有一个阶段在算，空闲 75%。GPipe 切成四个微批：先做全部前向，再做全部反向，空闲 43%。"
        "1F1B：一次前向、一次反向交替，保存的微批更少。",
        "one": "整批一次通过：空闲 {}",
        "gpipe": "GPipe，4 个微批：空闲 {}，保存 {} 份",
        "1f1b": "1F1B，8 个微批：空闲 {}，保存 {} 份",
        "stage": "阶段 {}",
        "legend": "蓝：前向，橙：反向，各占一个时间单位",
    },
}


def draw(words: dict[str, str]) -> Sheet:
    """Three grids of time by stage."""
    sheet = Sheet(474, words["title"], words["desc"])
    plans = (("one", gpipe, 1, 50.0), ("gpipe", gpipe, BATCHES, 28.0), ("1f1b", one_forward_one_backward, 8, 18.0))
    for index, (name, schedule, batches, unit) in enumerate(plans):
        top = 10 + index * 146
        orders: list[list[Op]] = [schedule(stage, STAGES, batches) for stage in range(STAGES)]
        idle, held, ends = play(orders)
        sheet.text(10, top + 14, words[name].format(f"{idle:.0%}", held), at="start", kind="bold")
        for stage in range(STAGES):
            y = top + 24 + stage * (HIGH + 4)
            sheet.text(10, y + 17, words["stage"].format(stage), 12, at="start", kind="faint", fit=LEFT - 12)
            sheet.line((LEFT, y + HIGH + 2), (LEFT + unit * max(ends.values()), y + HIGH + 2), kind="dashed")
        for (stage, (kind, batch)), end in ends.items():
            y = top + 24 + stage * (HIGH + 4)
            colour = "blue" if kind == "F" else "orange"
            sheet.cell(LEFT + unit * (end - 1), y, unit, HIGH, str(batch), colour, 12)
    sheet.text(10, 464, words["legend"], 12, at="start", kind="faint")
    return sheet
