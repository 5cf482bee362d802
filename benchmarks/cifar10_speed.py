"""CIFAR-10 to 94 %: seconds and top-1 of `lockstep train cifar10-speed` over seeds, one run after the other.

    python benchmarks/cifar10_speed.py --data-dir DIR --seeds 5
    python benchmarks/cifar10_speed.py --data-dir DIR --first 5 --seeds 5      five more; results are put together

A run's seconds are those between its assembled parts and its last evaluation, as its journal has them: imports and the
reading of the images are outside, the training of all epochs and the evaluation over six views are inside.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, interval, print_table, table, write

from lockstep.monitoring.journal import end_of, read


def run(seed: int, flags: list[str]) -> dict[str, Any]:
    """One run in a process of its own; its end record and its speed."""
    with tempfile.TemporaryDirectory(prefix="lockstep-speed-") as folder:
        command = ["-m", "lockstep", "train", "cifar10-speed", "--nproc", "1", "--seed", str(seed), *flags]
        subprocess.run([sys.executable, *command, "--checkpoint-every", "0", "--out", folder], check=True)
        records = read(Path(folder, "journal.jsonl"))
    rates = [r["images_per_s"] for r in records if r["kind"] == "step"]
    started = next(r for r in records if r["kind"] == "run")
    end = end_of(records)
    assert end is not None  # it ended with code 0
    return {
        "seed": seed,
        "top1": end["top1"],
        "seconds": end["seconds"],
        "images_per_s": statistics.median(rates),
        "threads": started["threads"],
        "peak_memory_gib": end["peak_memory_gib"][0],
    }


def tables(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs, their means and spread."""
    top1, seconds = [r["top1"] for r in runs], [r["seconds"] for r in runs]
    rows: list[list[Any]] = [
        [str(r["seed"]), f"{r['top1']:.2%}", round(r["seconds"]), round(r["images_per_s"])] for r in runs
    ]
    mean = f"{statistics.mean(top1):.2%}"
    spread = f" (standard deviation {statistics.stdev(top1):.2%})" if len(runs) > 1 else ""
    rows.append(["mean", mean + spread, round(statistics.mean(seconds)), None])
    low, high = interval(seconds)
    notes = [
        f"Median {statistics.median(seconds):.0f} s [{low:.0f}, {high:.0f}]; {runs[0]['threads']} threads. They hold "
        "all epochs and the evaluation; not imports and the reading of the images.",
        "top-1 is over six views of each test image (--tta shift), as in the figures published for airbench94.",
    ]
    return [table("CIFAR-10 to 94 %: lockstep train cifar10-speed", ["seed", "top-1", "s", "images/s"], rows, notes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--epochs", type=int, default=0, help="0: the recipe's")
    args = parser.parse_args()
    flags = ["--data-dir", args.data_dir] if args.data_dir else []
    flags += ["--epochs", str(args.epochs)] if args.epochs else []
    path = RESULTS / "cifar10_speed.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() and args.first else []
    for seed in range(args.first, args.first + args.seeds):
        kept.append(run(seed, flags))
        write("cifar10_speed", {"runs": kept, "tables": tables(kept)})
    print_table(tables(kept)[0])


if __name__ == "__main__":
    main()
