"""What the self-check costs: runs with it beside runs with `--law off`, on one process and on two.

    python benchmarks/law.py [--data-dir DIR] [--rounds 3] [--only mnist,photos]
    python benchmarks/law.py --quick                               a minute; writes nothing

Each run is the command, in turns. Its seconds are those of its steps, by the journal; evaluations and checkpoints are
left out. A run of 1,000 steps is checked 11 times; of networks that take long fewer steps are run, and what the last
check there takes longer than a step counts for each of those that a run of 1,000 would have had after it. Photos are
files of 500x375 pixels. Writes results/law.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import interleave, print_table, ratio, show, table, write
from photos import SMALL, write_photos

from lockstep.training.self_check import is_checked

RUN = 1000  # steps, for which the cost is told


@dataclass(frozen=True)
class Case:
    """A recipe with flags, and how many steps of it are run."""

    args: tuple[str, ...]
    images: int  # of the set
    batch: int
    steps: int


CASES = {
    "mnist": Case(("mnist",), 60_000, 60, RUN),
    "cifar10, ResNet-18": Case(("cifar10",), 50_000, 32, 65),
    "photos, ResNet-18": Case(("photos", "--init", "none", "--model", "resnet18"), 512, 16, 32),
}


def seconds(case: Case, steps: int, nproc: int, law: str, data: str) -> list[float]:
    """Seconds of each step of one run."""
    with tempfile.TemporaryDirectory(prefix="lockstep-law-") as folder:
        part = steps * case.batch / case.images
        args = [*case.args, "--data-dir", data, "--batch-size", str(case.batch), "--device", "cpu"]
        args += ["--nproc", str(nproc), "--law", law, "--epochs", "1", "--fraction", str(part)]
        args += ["--log-every", "1", "--checkpoint-every", "0", "--out", "run"]
        command = [sys.executable, "-m", "lockstep", "train", *args]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(ended.stderr[-3000:])
        lines = (Path(folder) / "run" / "journal.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    return [case.batch / float(record["images_per_s"]) for record in found]


def in_steps(run: list[float]) -> list[float]:
    """Seconds of steps in those of the same run that aren't checked: another run may meet a slower moment."""
    step = statistics.median(second for number, second in enumerate(run) if not is_checked(number))
    return [second / step for second in run]


def measure(
    name: str, case: Case, data: str, rounds: int
) -> list[tuple[str, float, float, float, dict[str, float], float]]:
    """By processes: ms a step, steps that the first check and another take, ratio of runs, percent of 1,000 steps."""
    rows = []
    for nproc in (1, 2):
        sides = {law: partial(seconds, case, case.steps, nproc, law, data) for law in ("off", "warn")}
        found = interleave(sides, rounds, warmup=0)
        step = statistics.median(second for run in found["off"] for second in run)
        on, off = ([in_steps(run) for run in found[law]] for law in ("warn", "off"))
        first = statistics.median(a[0] - b[0] for a, b in zip(on, off, strict=True))
        checked = [s for s in range(1, case.steps) if is_checked(s)]
        longer = [statistics.median(run[s] for run in on) - 1 for s in checked]
        later = sum(is_checked(s) for s in range(case.steps, RUN))
        other = (sum(longer) + later * longer[-1]) / (len(longer) + later)
        percent = 100 * (first + other * (len(longer) + later)) / RUN
        over = ratio(*([sum(run) for run in found[law]] for law in ("warn", "off")))
        rows.append((f"{name}, N = {nproc}", step * 1e3, first, other, over, percent))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="", help="folder with the official files of MNIST and CIFAR-10")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(name.split(",")[0] for name in CASES), help="cases, by their recipe")
    parser.add_argument("--quick", action="store_true", help="a few steps, one round; writes nothing")
    args = parser.parse_args()
    rows: list[list[Any]] = []
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-photos-") as photos:
        if "photos" in args.only.split(","):
            write_photos(Path(photos), 512, SMALL, args.data_dir or "made")
        for name, case in CASES.items():
            if (recipe := name.split(",")[0]) not in args.only.split(","):
                continue
            if args.quick:
                case = replace(case, batch=8, steps=5)
            data = photos if recipe == "photos" else args.data_dir or "made"
            for cell, ms, first, other, over, percent in measure(name, case, data, 1 if args.quick else args.rounds):
                kept[cell] = {"ms_per_step": ms, "steps_of_first_check": first, "steps_of_another": other}
                kept[cell] |= {"over_off": over, "percent": percent}
                whole = show(over) if case.steps == RUN else "-"  # a short run is checked more often
                rows.append([cell, case.steps, f"{ms:.1f}", f"{first:.1f}", f"{other:.1f}", whole, f"{percent:.1f} %"])
                print("  ".join(map(str, rows[-1])), flush=True)  # an hour's rows are not lost with the last of them
    columns = ["run", "steps", "ms/step", "first check, in steps", "another", "over off", f"part of {RUN:,} steps"]
    notes = [f"{args.rounds} interleaved runs each; median and 95 % bootstrap interval of paired ratios."]
    result = {"rounds": args.rounds, "cells": kept, "tables": [table("The self-check", columns, rows, notes)]}
    print_table(result["tables"][0])
    if not args.quick:
        write("law", result)


if __name__ == "__main__":
    main()
