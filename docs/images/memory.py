"""Bars of what a step's memory is made of; the numbers are those of the page, which a test compares with the program."""

import re

from docs.images.drawing import HERE, Sheet

COLOURS = {"parameters": "blue", "gradients": "orange", "optimizer": "purple", "activations": "green"}
WIDE, HIGH = 448, 22
WORDS = {
    "en": {
        "title": "Memory of a training step of ResNet-50 and ViT-L/16, batch of 32, in GiB",
        "desc": "Stacked bars of parameters, gradients, optimizer state and activations, for float32, bf16, bf16 with "
        "recomputation, and the same sharded over eight ranks. The numbers are in the table of the page.",
        "float32": "float32",
        "bf16": "bf16",
        "bf16, recomputed": "bf16, activations recomputed",
        "the same, FSDP 8": "the same, FSDP over 8 ranks",
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "activations": "activations",
        "batch": "{}, batch 32",
    },
    "zh": {
        "title": "ResNet-50 和 ViT-L/16 训练一步的内存，批大小 32，单位 GiB",
        "desc": "堆叠条形图：参数、梯度、优化器状态和激活值；分别为 float32、bf16、bf16 加重计算、再用八个 rank 分片。"
        "具体数字见页面里的表。",
        "float32": "float32",
        "bf16": "bf16",
        "bf16, recomputed": "bf16，重计算激活值",
        "the same, FSDP 8": "同上，FSDP 分到 8 个 rank",
        "parameters": "参数",
        "gradients": "梯度",
        "optimizer": "优化器",
        "activations": "激活值",
        "batch": "{}，批大小 32",
    },
}


def numbers() -> dict[str, dict[str, list[float]]]:
    """Model -> way -> GiB of the four parts and in all, from the page."""
    text = (HERE.parent / "concepts/memory.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[float]]] = {}
    for line in text.partition("memory.py\n")[2].partition("```")[0].splitlines():
        if "," in line and "parameters" in line:
            model = found[line.partition(",")[0]] = {}
        elif row := re.fullmatch(r"(\S.*?\S) {2,}" + r" +".join([r"([\d.]+)"] * 5), line):
            model[row[1]] = [float(row[i]) for i in range(2, 7)]
    return found


def draw(words: dict[str, str]) -> Sheet:
    """A group of bars a model, each on a scale of its own."""
    sheet = Sheet(470, words["title"], words["desc"])
    for index, part in enumerate(COLOURS):
        sheet.rect(14 + 116 * index, 12, 16, 16, COLOURS[part])
        sheet.text(36 + 116 * index, 25, words[part], 12, at="start", fit=92)
    for group, (model, ways) in enumerate(numbers().items()):
        top = 52 + group * 212
        sheet.text(14, top, words["batch"].format(model), at="start", kind="bold")
        scale = (WIDE - 4) / max(row[-1] for row in ways.values())
        for index, (way, row) in enumerate(ways.items()):
            y, left = top + 22 + 46 * index, 14.0
            sheet.text(14, y + 4, words[way], 12, at="start", kind="faint")
            sheet.text(462, y + 4, f"{row[-1]:.2f} GiB", 12, at="end")
            for part, value in zip(COLOURS, row[:-1], strict=True):
                sheet.rect(round(left, 1), y + 9, round(value * scale, 1), HIGH - 4, COLOURS[part], r=1)
                left += value * scale
    return sheet
