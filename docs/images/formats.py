"""The bits of four number formats, and the range of magnitudes that each can hold."""

from math import log10

from docs.images.drawing import Sheet

FORMATS = {"float32": (8, 23), "tf32": (8, 10), "float16": (5, 10), "bfloat16": (8, 7)}  # bits of exponent, mantissa
BIT, HIGH, ROW = 14, 22, 48
LOW, TOP = -45, 40  # powers of ten on the scale
WORDS = {
    "en": {
        "title": "Bit layouts of float32, tf32, float16 and bfloat16, and their ranges",
        "desc": "Every format has one sign bit. float32: 8 bits of exponent, 23 of mantissa; tf32: 8 and 10; float16: 5 and "
        "10; bfloat16: 8 and 7. Below, on a logarithmic scale: float16 reaches from 6e-8 to 65504, the others from about "
        "1e-38 to 3e38.",
        "bits": "{}: 1 + {} + {} bits",
        "sign": "sign",
        "exponent": "exponent",
        "mantissa": "mantissa",
        "range": "magnitudes, by powers of ten",
    },
    "zh": {
        "title": "float32、tf32、float16、bfloat16 的位布局与范围",
        "desc": "每种格式都有一个符号位。float32：8 位指数、23 位尾数；tf32：8 和 10；float16：5 和 10；bfloat16：8 和 7。"
        "下方是对数刻度：float16 只覆盖 6e-8 到 65504，其余约为 1e-38 到 3e38。",
        "bits": "{}：1 + {} + {} 位",
        "sign": "符号",
        "exponent": "指数",
        "mantissa": "尾数",
        "range": "能表示的大小（10 的幂）",
    },
}


def place(power: float) -> float:
    """Where a power of ten is on the scale."""
    return 92 + (power - LOW) / (TOP - LOW) * 376


def draw(words: dict[str, str]) -> Sheet:
    """Bits above, ranges below."""
    sheet = Sheet(446, words["title"], words["desc"])
    for index, (part, colour) in enumerate((("sign", "red"), ("exponent", "orange"), ("mantissa", "blue"))):
        sheet.rect(14 + 116 * index, 12, 16, 16, colour)
        sheet.text(36 + 116 * index, 25, words[part], 12, at="start")
    for row, (name, (exponent, mantissa)) in enumerate(FORMATS.items()):
        y = 52 + row * ROW
        sheet.text(14, y, words["bits"].format(name, exponent, mantissa), 13, at="start", kind="bold")
        colours = ["red"] + ["orange"] * exponent + ["blue"] * mantissa
        for bit, colour in enumerate(colours):
            sheet.rect(14 + bit * BIT, y + 7, BIT, HIGH, colour, r=1)
    top = 268
    sheet.text(14, top, words["range"], 13, at="start", kind="bold")
    for row, (name, (exponent, mantissa)) in enumerate(FORMATS.items()):
        y = top + 16 + row * 30
        bias = 2 ** (exponent - 1) - 1
        normal, largest = (1 - bias) * log10(2), (bias + 1) * log10(2)
        least = normal - mantissa * log10(2)
        sheet.text(14, y + 15, name, 13, at="start", fit=76)
        sheet.rect(round(place(least), 1), y, round(place(normal) - place(least), 1), 20, "grey", r=1)
        sheet.rect(round(place(normal), 1), y, round(place(largest) - place(normal), 1), 20, "green", r=1)
    for power in (-40, -30, -20, -10, 0, 10, 20, 30):
        x = round(place(power), 1)
        sheet.line((x, top + 10), (x, top + 136), kind="dashed")
        sheet.text(x, top + 152, f"1e{power}" if power else "1", 12, kind="faint")
    return sheet
