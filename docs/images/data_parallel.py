"""A step of DataParallel and one of DistributedDataParallel on four GPUs, as time lines. The lengths are a sketch."""

from docs.images.drawing import Sheet

GPUS, ROW, HIGH, LEFT = 4, 32, 26, 62
WORDS = {
    "en": {
        "title": "Time lines of a step: DataParallel and DistributedDataParallel on four GPUs",
        "desc": "DataParallel: GPU 0 scatters the batch and copies the model to the others; four threads of one process "
        "start the forward passes one after the other; GPU 0 gathers outputs, computes the loss, adds up gradients and "
        "takes the step while the others wait. DistributedDataParallel: four processes do the same at once, gradients "
        "are all-reduced during backward, and each takes the step.",
        "dp": "DataParallel: one process, four threads",
        "ddp": "DistributedDataParallel: four processes",
        "f": "forward",
        "b": "backward",
        "1": "scatter the batch, replicate the model (GPU 0 sends)",
        "2": "gather outputs on GPU 0, loss",
        "3": "add up gradients on GPU 0 (it receives all)",
        "4": "optimizer step",
        "5": "all-reduce, mostly during backward",
        "idle": "white: waiting; a sketch, lengths not measured",
    },
    "zh": {
        "title": "一步的时间线：四块 GPU 上的 DataParallel 与 DistributedDataParallel",
        "desc": "DataParallel：GPU 0 切分批数据，并把模型复制到其他 GPU；同一个进程的四个线程先后启动前向；GPU 0 收集输出、算损失、"
        "累加梯度、更新参数，其他 GPU 等待。DistributedDataParallel：四个进程同时工作，梯度在反向期间 all-reduce，各自更新。",
        "dp": "DataParallel：一个进程，四个线程",
        "ddp": "DistributedDataParallel：四个进程",
        "f": "前向",
        "b": "反向",
        "1": "scatter 切分批数据，replicate 复制模型（GPU 0 发出）",
        "2": "gather：输出收到 GPU 0，算损失",
        "3": "梯度加到 GPU 0 上（全部由它接收）",
        "4": "优化器更新",
        "5": "all-reduce，大部分与反向重叠",
        "idle": "空白：等待。仅为示意，长度不是实测",
    },
}


def names(sheet: Sheet, y: float, title: str) -> None:
    """The rows' names."""
    sheet.text(12, y + 14, title, at="start", kind="bold")
    for gpu in range(GPUS):
        top = y + 24 + gpu * ROW
        sheet.text(12, top + 18, f"GPU {gpu}", 13, at="start")
        sheet.line((LEFT, top + HIGH + 2), (474, top + HIGH + 2), kind="dashed")


def draw(words: dict[str, str]) -> Sheet:
    """Two time lines and what their colours mean."""
    sheet = Sheet(476, words["title"], words["desc"])
    names(sheet, 8, words["dp"])
    for gpu in range(GPUS):
        top = 32 + gpu * ROW
        late = 9 * gpu  # one interpreter starts the four passes in turns
        sheet.cell(LEFT + 46 + late, top, 72, HIGH, words["f"], "blue", 13)
        sheet.cell(LEFT + 226 + late, top, 92, HIGH, words["b"], "orange", 13)
    sheet.cell(LEFT, 32, 44, HIGH, "1", "red", 13)
    sheet.cell(LEFT + 148, 32, 50, HIGH, "2", "red", 13)
    sheet.cell(LEFT + 348, 32, 38, HIGH, "3", "red", 13)
    sheet.cell(LEFT + 388, 32, 22, HIGH, "4", "purple", 13)
    names(sheet, 176, words["ddp"])
    for gpu in range(GPUS):
        top = 200 + gpu * ROW
        sheet.cell(LEFT, top, 72, 18, words["f"], "blue", 13)
        sheet.cell(LEFT + 74, top, 92, 18, words["b"], "orange", 13)
        sheet.rect(LEFT + 100, top + 20, 84, 6, "green", r=2)
        sheet.cell(LEFT + 186, top, 22, 18, "4", "purple", 13)
    for row, (number, colour) in enumerate((("1", "red"), ("2", "red"), ("3", "red"), ("4", "purple"), ("5", "green"))):
        top = 344 + row * 22
        if number == "5":
            sheet.rect(12, top + 6, 22, 7, colour, r=2)
        else:
            sheet.cell(12, top, 22, 18, number, colour, 12)
        sheet.text(42, top + 14, words[number], 13, at="start")
    sheet.text(12, 468, words["idle"], 12, at="start", kind="faint")
    return sheet
