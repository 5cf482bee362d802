"""What the wrong way of each step costs, and the right one, on 1, 2 and 4 processes: a table in Markdown.

    python consequences.py           all steps; minutes, most of them torch's import
    python consequences.py 03 07     some of them

Every figure is read out of what the programs print.
"""

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PROCESSES = (1, 2, 4)
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


@dataclass(frozen=True)
class Step:
    """What a step shows. `ways`: name of a row -> flags; wrong ones begin with the flag --wrong."""

    title: str
    chinese: str
    figures: tuple[Figure, ...]
    ways: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"`--wrong`": ("--wrong",), "right": ()})


STEPS = {
    "01": Step("A plain loop", "普通的训练循环", (LOSS, ACCURACY)),
    "02": Step("DataParallel", "DataParallel", (LOSS, WEIGHTS)),
    "03": Step("DDP by torchrun", "用 torchrun 启动 DDP", (STEPS_AN_EPOCH, LOSS, ACCURACY)),
    "04": Step("DDP by spawn", "用 spawn 启动 DDP", (SECOND_RUN,)),
    "05": Step("Why the loss isn't the loss", "为什么损失不是损失", (TRAINING, WEIGHTS)),
    "06": Step("set_epoch", "set_epoch", (FIRST_SAMPLES, LOSS)),
    "07": Step("Evaluation on all ranks", "所有 rank 一起评估", (EVALUATED, ACCURACY, LOSS)),
}


OWN_LAUNCHER = {"02": "--parts", "04": "--nproc", "14": "--nproc"}  # the flag by which a program is told N


def command(step: str, n: int, flags: tuple[str, ...]) -> list[str]:
    """The arguments of Python that run a step's program on n processes: by torchrun, unless it starts them itself."""
    (program,) = HERE.glob(f"{step}-*.py")
    if step in OWN_LAUNCHER:
        return [str(program), *flags, OWN_LAUNCHER[step], str(n)]
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), str(program), *flags]


def to_fail(step: str, flags: tuple[str, ...]) -> bool:
    """True for step 4's wrong way, beside which another program holds the port."""
    return step == "04" and "--wrong" in flags


def launch(step: str, n: int, flags: tuple[str, ...]) -> str:
    """What a step's program says on n processes."""
    with socket.socket() as other:
        if to_fail(step, flags):
            other.bind(("localhost", PORT))
            other.listen()
        ended = subprocess.run([sys.executable, *command(step, n, flags)], capture_output=True, text=True)
    if (ended.returncode != 0) is not to_fail(step, flags):
        raise SystemExit(ended.stderr)
    return ended.stdout + ended.stderr


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


def rows(step: str, measured: Mapping[str, Mapping[int, list[str]]], chinese: bool = False) -> list[str]:
    """A step's lines of a table: way, figure, and its values on 1, 2 and 4 processes."""
    return [
        f"| {WAYS.get(way, way) if chinese else way} | {figure.chinese if chinese else figure.name} | "
        + " | ".join(by_n[n][place] for n in PROCESSES)
        + " |"
        for place, figure in enumerate(STEPS[step].figures)
        for way, by_n in measured.items()
    ]


WAYS = {"right": "正确"}


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
