"""Five ways to put a network of four layers on two devices: what each holds and what it sends."""

from docs.images.drawing import Sheet

LAYERS, DEVICES, CELL, HIGH = 4, 2, 40, 22
PANEL, LEFT = 108, 104
WAYS = ("data", "sharded", "model", "pipeline", "tensor")
WORDS = {
    "en": {
        "title": "Data, sharded, model, pipeline and tensor parallelism on two devices",
        "desc": "Five panels, each with two devices and four layers. Data parallel: each device has all layers, and half "
        "of the batch. Sharded: each device keeps half of each layer, and gathers a layer while it is used. Model "
        "parallel: layers 1 and 2 here, 3 and 4 there, for the whole batch. Pipeline: the same with small batches that "
        "follow each other. Tensor parallel: each layer is cut, and both devices work on the same images.",
        "data": "data parallel",
        "data1": "holds: everything",
        "data2": "sends: gradients, once a step",
        "sharded": "sharded (FSDP, ZeRO)",
        "sharded1": "holds: half of each layer",
        "sharded2": "sends: weights, gradients",
        "model": "model parallel",
        "model1": "holds: its own layers",
        "model2": "sends: activations at the cut",
        "pipeline": "pipeline parallel",
        "pipeline1": "holds: its own layers",
        "pipeline2": "sends: the same, in pieces",
        "tensor": "tensor parallel",
        "tensor1": "holds: half of each layer",
        "tensor2": "sends: every layer's outputs",
        "device": "device {}",
        "legend": "yellow: images of the batch; blue: layers 1 to 4",
        "half": "1/2",
    },
    "zh": {
        "title": "两台设备上的数据并行、分片、模型并行、流水线并行和张量并行",
        "desc": "五幅图，每幅有两台设备、四层网络。数据并行：每台设备有全部层，各算半个批。分片：每台设备保存每层的一半，用到时再收集。"
        "模型并行：前两层在一台，后两层在另一台。流水线并行：同样切层，但把批切成小份依次流过。"
        "张量并行：每一层都切开，两台设备算同一批图片。",
        "data": "数据并行",
        "data1": "保存：全部",
        "data2": "发送：梯度，每步一次",
        "sharded": "分片（FSDP、ZeRO）",
        "sharded1": "保存：每层的一半",
        "sharded2": "发送：权重和梯度",
        "model": "模型并行",
        "model1": "保存：自己的几层",
        "model2": "发送：切口处的激活值",
        "pipeline": "流水线并行",
        "pipeline1": "保存：自己的几层",
        "pipeline2": "发送：同上，切成小份",
        "tensor": "张量并行",
        "tensor1": "保存：每层的一半",
        "tensor2": "发送：每一层的输出",
        "device": "设备 {}",
        "legend": "黄：批里的图片；蓝：第 1 到 4 层",
        "half": "1/2",
    },
}


def device(sheet: Sheet, y: float, number: int, way: str, words: dict[str, str]) -> None:
    """A device's row: its part of the batch and of the layers."""
    sheet.text(10, y + 16, words["device"].format(number), 12, at="start", kind="faint", fit=58)
    whole = way in ("tensor",)
    first = way in ("model", "pipeline") and number == 0
    if way in ("data", "sharded"):
        sheet.cell(70, y, 28, HIGH, words["half"], "yellow", 12)
    elif whole or (first and way == "model"):
        sheet.cell(70, y, 28, HIGH, "1", "yellow", 12)
    elif first:
        for piece in range(4):
            sheet.rect(70 + 7 * piece, y, 6, HIGH, "yellow", r=1)
    for layer in range(LAYERS):
        left = LEFT + layer * (CELL + 4)
        mine = way not in ("model", "pipeline") or layer // 2 == number
        if not mine:
            continue
        if way == "sharded":
            sheet.rect(left, y, CELL, HIGH, "page")
            sheet.rect(left + number * CELL / 2, y, CELL / 2, HIGH, "blue")
            sheet.text(left + (0.25 + number / 2) * CELL, y + 16, str(layer + 1), 12)
        elif way == "tensor":
            sheet.cell(left, y + (4 if number == 0 else 0), CELL, HIGH - 4, str(layer + 1), "blue", 12)
        else:
            sheet.cell(left, y, CELL, HIGH, str(layer + 1), "blue", 12)


def draw(words: dict[str, str]) -> Sheet:
    """A panel a way."""
    sheet = Sheet(PANEL * len(WAYS) + 24, words["title"], words["desc"])
    for index, way in enumerate(WAYS):
        y = 6 + PANEL * index
        sheet.text(10, y + 18, words[way], at="start", kind="bold")
        for number in range(DEVICES):
            device(sheet, y + 32 + number * (HIGH + (2 if way == "tensor" else 10)), number, way, words)
        if way in ("model", "pipeline"):
            x = LEFT + 2 * (CELL + 4) - 24
            sheet.line((x, y + 54), (x, y + 75), (x + 20, y + 75), arrow=True)
        sheet.text(290, y + 48, words[f"{way}1"], 12, at="start", fit=190)
        sheet.text(290, y + 78, words[f"{way}2"], 12, at="start", fit=190)
        if index:
            sheet.line((8, y), (472, y), kind="faint-stroke")
    sheet.text(10, PANEL * len(WAYS) + 16, words["legend"], 12, at="start", kind="faint")
    return sheet
