"""What the wrong way of each step costs, and the right one, on 1, 2 and 4 processes: a table in Markdown.

    python consequences.py           all steps; minutes, most of them torch's import
    python consequences.py 03 07     some of them

Every figure is read out of what the programs print.
"""

import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PROCESSES = (1, 2, 4)
FILE = "run.pt"  # step 12's checkpoint
PORT = 12355  # of step 4's wrong way; taken here, as by another run
Run = Callable[[str, int, tuple[str, ...]], str]  # step, processes, flags -> what the program says


@dataclass(frozen=True)
class Figure:
    """A figure of a program's output: its name in English and Chinese, and where it stands; the last match counts."""

    name: str
    chinese: str
    pattern: str

    def read(self, text: str) -> str:
        found = re.findall(self.pattern, text)
        if not found:
            raise ValueError(f"no {self.name} ({self.pattern}) in:\n{text}")
        return str(found[-1])


LOSS = Figure("test loss", "测试损失", r"test loss ([\d.]+)")
TRAINING = Figure("training loss", "训练损失", r"training loss ([\d.]+)")
ACCURACY = Figure("accuracy", "准确率", r"accuracy ([\d.]+%)")
STEPS_AN_EPOCH = Figure("steps an epoch", "每个 epoch 的步数", r"(\d+) steps")
SECOND_RUN = Figure("a second run ends with", "第二个任务的结局", r"EADDRINUSE|weights [\d.]+")
FIRST_SAMPLES = Figure("the third epoch begins with", "第三个 epoch 开头的样本", r"first samples \[(.*)\]")
EVALUATED = Figure("evaluated samples", "评估的样本数", r"of (\d+) samples")
WEIGHTS = Figure("norm of the weights", "权重的范数", r"weights ([\d.]+)")


REDUCTIONS = Figure("all-reduces an epoch", "每个 epoch 的 all-reduce 次数", r"(\d+) all-reduces")
MASKS = Figure("different masks of 64", "64 个掩码中不同的个数", r"(\d+) different masks")
SEEN = Figure("images seen, of 1437", "1437 张图片中看到的张数", r"(\d+) of 1437 images")

WRONG, RIGHT = {"`--wrong`": ("--wrong",)}, {"right": ()}
RESUMED = {"uninterrupted": (), "resumed, `--wrong`": ("--file", FILE, "--wrong"), "resumed, right": ("--file", FILE)}


@dataclass(frozen=True)
class Step:
    """What a step shows. `ways`: name of a row -> flags."""

    title: str
    chinese: str
    figures: tuple[Figure, ...]
    ways: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: WRONG | RIGHT)


STEPS = {
    "01": Step("A plain loop", "普通的训练循环", (LOSS, ACCURACY)),
    "02": Step("DataParallel", "DataParallel", (LOSS, WEIGHTS)),
    "03": Step("DDP by torchrun", "用 torchrun 启动 DDP", (STEPS_AN_EPOCH, LOSS, ACCURACY)),
    "04": Step("DDP by spawn", "用 spawn 启动 DDP", (SECOND_RUN,)),
    "05": Step("Why the loss isn't the loss", "为什么损失不是损失", (TRAINING, WEIGHTS)),
    "06": Step("set_epoch", "set_epoch", (FIRST_SAMPLES, LOSS)),
    "07": Step("Evaluation on all ranks", "所有 rank 一起评估", (EVALUATED, ACCURACY, LOSS)),
    "08": Step("Mixed precision", "混合精度", (TRAINING, LOSS)),
    "09": Step("Accumulation and no_sync", "梯度累积与 no_sync", (STEPS_AN_EPOCH, REDUCTIONS, WEIGHTS)),
    "10": Step("Batch norm", "批归一化", (LOSS, WEIGHTS), {**WRONG, "global": (), "`--groups`": ("--groups",)}),
    "11": Step(
        "Dropout and seeds", "dropout 与随机种子", (MASKS, LOSS), {**WRONG, "`--by-rank`": ("--by-rank",), **RIGHT}
    ),
    "12": Step("Checkpoint and resume", "检查点与续训", (TRAINING, LOSS, WEIGHTS), RESUMED),
    "13": Step("Several machines", "多台机器", (SEEN, LOSS)),
    "14": Step("The same with Lockstep", "用 Lockstep 做同样的事", (STEPS_AN_EPOCH, LOSS, ACCURACY)),
}


OWN_LAUNCHER = {"02": "--parts", "04": "--nproc", "14": "--nproc"}  # the flag by which a program is told N


def program(step: str) -> Path:
    """The program of a step, as "07"."""
    (path,) = HERE.glob(f"{step}-*.py")
    return path


def machines(step: str, n: int) -> int:
    """On how many machines, or what this one plays of them, a step's n processes run."""
    return 2 if step == "13" and n > 1 else 1


def commands(step: str, n: int, flags: tuple[str, ...]) -> list[list[str]]:
    """The arguments of Python that run a program on n processes, on each machine: torchrun's, or the program's own."""
    path, nodes = str(program(step)), machines(step, n)
    if step in OWN_LAUNCHER:
        return [[path, *flags, OWN_LAUNCHER[step], str(n)]]
    torchrun, each = ["-m", "torch.distributed.run"], ["--nproc-per-node", str(n // nodes), path, *flags]
    if nodes == 1:
        return [[*torchrun, "--standalone", *each]]
    where = ["--nnodes", str(nodes), "--master-addr", "localhost", "--node-rank"]
    return [[*torchrun, *where, str(node), *each] for node in range(nodes)]


def to_fail(step: str, flags: tuple[str, ...]) -> bool:
    """True for step 4's wrong way, beside which another program holds the port."""
    return step == "04" and "--wrong" in flags


def before(flags: tuple[str, ...]) -> tuple[str, ...]:
    """What has to be run first, to leave the checkpoint that a run goes on from; step 12 alone has one."""
    return ("--file", FILE, "--stop", "2") if FILE in flags and "--stop" not in flags else ()


def launch(step: str, n: int, flags: tuple[str, ...]) -> str:
    """What a step's program says on n processes."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as other:
        if to_fail(step, flags):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # nothing but a listener is in the way
            other.bind(("localhost", PORT))
            other.listen()
        if first := before(flags):
            _outputs(step, n, first, folder)
        return _outputs(step, n, flags, folder)


def _outputs(step: str, n: int, flags: tuple[str, ...], folder: str) -> str:
    argvs = [[sys.executable, *argv] for argv in commands(step, n, flags)]
    pipe = subprocess.PIPE
    begun = [subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, cwd=folder) for argv in argvs]
    outputs = [process.communicate() for process in begun]
    for process, (_, errors) in zip(begun, outputs, strict=True):
        if (process.returncode != 0) is not to_fail(step, flags):
            raise SystemExit(errors)
    return "".join(out + errors for out, errors in outputs)


def measure(run: Run, step: str) -> dict[str, dict[int, list[str]]]:
    """Way -> processes -> figures, in the order of the step's own."""
    return {
        way: {
            n: [figure.read(text) for figure in STEPS[step].figures]
            for n in PROCESSES
            for text in [run(step, n, flags)]
        }
        for way, flags in STEPS[step].ways.items()
    }


WAYS = {  # in Chinese
    "right": "正确",
    "global": "全局",
    "uninterrupted": "不中断",
    "resumed, `--wrong`": "续训 `--wrong`",
    "resumed, right": "正确地续训",
}


def rows(step: str, measured: Mapping[str, Mapping[int, list[str]]], chinese: bool = False) -> list[str]:
    """A step's lines of a table: way, figure, and its values on 1, 2 and 4 processes."""
    return [
        f"| {WAYS.get(way, way) if chinese else way} | {figure.chinese if chinese else figure.name} | "
        + " | ".join(by_n[n][place] for n in PROCESSES)
        + " |"
        for place, figure in enumerate(STEPS[step].figures)
        for way, by_n in measured.items()
    ]


def head(chinese: bool = False) -> list[str]:
    """The first lines of a table."""
    return [
        "| 写法 | 数值 | N = 1 | N = 2 | N = 4 |" if chinese else "| way | figure | N = 1 | N = 2 | N = 4 |",
        "| --- | --- | --- | --- | --- |",
    ]


def main(steps: Iterable[str]) -> None:
    for step in steps:
        print(f"\n{step} {STEPS[step].title}\n")
        print("\n".join(head() + rows(step, measure(launch, step))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or STEPS)
