"""Faults planted in a copy of the product, one at a time: does a plain run say what each does to the law?

python -m tests.planted                   every fault: digits on 1 and on 2 processes, three steps an epoch
python -m tests.planted --only mean --keep DIR

said: a `law` record at one of the first 10 steps, or a refusal; on which numbers of processes. missed: nothing was
said, and weights or metrics of the two runs differ. harmless: nothing was said, and they are the same. The short last
batch has a sample for one of the two processes alone.

Of 42 faults 31 were said, 5 were harmless and 6 missed. The check takes the gradients of the batch that the step got,
and makes one of its images again: what comes after (learning rate, clipping) is not in it, nor what it does in the same
wrong way itself (a dummy in batch norm's statistics, slices of exact mode).
"""

import argparse
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
DEADLINE_S, STEPS = 150.0, 10
EQUAL = 1e-3  # of a tensor's largest value: rounding in float32 grows to 1e-5 in 12 steps
FLAGS = (
    *("train", "digits", "--model", "tests.planted:net", "--device", "cpu", "--threads", "1", "--workers", "0"),
    *("--batch-size", "50", "--accumulate", "2", "--fraction", "0.0713", "--epochs", "4", "--crop-padding", "1"),
    *("--flip", "--optimizer", "sgd", "--lr", "0.05", "--clip-norm", "1"),
    *("--max-restarts", "0", "--hang-timeout", "60"),
)


@dataclass(frozen=True)
class Fault:
    """A text of a file of the product, and what takes its place; further flags of the run."""

    file: str
    text: str
    new: str
    flags: str


def read_faults(text: str) -> dict[str, Fault]:
    """Faults by name: the file and flags, then lines with - and lines with +."""
    found = {}
    for block in text.split("== ")[1:]:
        name, where, *lines = block.rstrip("\n").split("\n")
        old, new = ("\n".join(line[2:] for line in lines if line[:1] == sign) for sign in "-+")
        file, _, flags = where.partition(" ")
        found[name] = Fault(file, old, new, flags)
    return found


FAULTS = read_faults((Path(__file__).parent / "planted_faults.txt").read_text())


class Net(nn.Module):
    """Has what a step looks after: batch norm, dropout, buffers that training moves, draws from every generator."""

    centre: Tensor
    seen: Tensor

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(in_channels, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Dropout(0.2)
        self.head = nn.Linear(8 * 36, num_classes)
        self.register_buffer("centre", torch.zeros(8 * 36))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1)
        if self.training:
            self.seen += len(x)
            h = h - self.centre
            self.centre = 0.9 * self.centre + 0.1 * (h + self.centre).detach().mean(0)
            h = h * (1 + 0.1 * torch.rand(1)) * (1 + 0.1 * torch.empty(()).cauchy_().clamp(-1, 1))
            h = h * (0.9 + 0.2 * random.random())
        logits: Tensor = self.head(h)
        return logits


def net(in_channels: int, num_classes: int) -> nn.Module:
    return Net(in_channels, num_classes)


def _begin(source: Path, out: Path, processes: int, more: str) -> NoReturn:
    """In a fork: what `lockstep train` of the copy does."""
    os.setsid()
    log = os.open(out.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["PYTHONHASHSEED"] = "0"
    sys.path[:0] = [str(source), str(ROOT)]
    sys.argv = ["lockstep", *FLAGS, *more.split(), "--nproc", str(processes), "--out", str(out)]
    code = 0
    try:
        runpy.run_module("lockstep", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(source: Path, out: Path, processes: int, more: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code (-9 at the deadline) and the journal."""
    if not (pid := os.fork()):
        _begin(source, out, processes, more)
    until, ended = time.monotonic() + DEADLINE_S, (0, 0)
    while not ended[0] and time.monotonic() < until:
        ended = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
    if not ended[0]:
        os.killpg(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    journal = out / "journal.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    return os.waitstatus_to_exitcode(ended[1]), [json.loads(line) for line in lines]


def apart(one: Path, other: Path) -> float:
    """The largest difference of the runs' weights, buffers and evaluations."""
    from safetensors.torch import load_file

    found = []
    for out in (one, other):
        tensors = load_file(out / "weights" / "final.safetensors")
        records = map(json.loads, (out / "journal.jsonl").read_text().splitlines())
        evaluations = [record["loss"] for record in records if record["kind"] == "eval"]
        found.append(tensors | {"evaluations": torch.tensor(evaluations)})
    a, b = found
    return max(float((a[k].double() - b[k].double()).abs().max() / a[k].double().abs().max().clamp(1e-3)) for k in a)


def judge(name: str, scratch: Path) -> str:
    """What came of a fault; "" is the product as it is."""
    fault = FAULTS.get(name)
    more = fault.flags if fault else ""
    shutil.copytree(ROOT / "src", scratch / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    if fault is not None:
        place = scratch / "src" / "lockstep" / fault.file
        text = place.read_text()
        if fault.text not in text:
            return "not planted: its place is gone"
        place.write_text(text.replace(fault.text, fault.new, 1))
    outs, said, failed = [scratch / f"run{n}" for n in (1, 2)], [], []
    for n, out in zip((1, 2), outs, strict=True):
        code, records = run(scratch / "src", out, n, more)
        if any(record["kind"] == "law" and record["step"] < STEPS for record in records):
            said.append(n)
        elif code:
            failed.append(f"N = {n} ends with {code}")
    if said or failed:
        return f"said on N = {said}" * bool(said) + ", ".join(failed)
    difference = apart(*outs)
    return f"{'harmless' if difference < EQUAL else 'missed'}, {difference:.1g} apart"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--keep", type=Path, help="folder for runs and their output")
    args = parser.parse_args()
    sys.dont_write_bytecode = True
    found = Counter[str]()
    for name in ["", *(name for name in FAULTS if args.only in name)]:
        folder = args.keep / (name or "none") if args.keep else Path(tempfile.mkdtemp(prefix="planted-"))
        verdict = judge(name, folder)
        if not args.keep:
            shutil.rmtree(folder)
        print(f"{name or '(no fault)'}: {verdict}", flush=True)
        found[verdict.partition(" ")[0].strip(",") if name else "none"] += 1
    print(", ".join(f"{times} {kind}" for kind, times in found.items() if kind != "none"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
