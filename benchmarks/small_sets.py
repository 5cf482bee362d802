"""The recipes for class folders on ten small sets, beside a small sweep: do the defaults learn as they come?

    python benchmarks/small_sets.py --data-dir DIR                    CIFAR-10 lies in DIR (tests/fetch_real_data.py)
    python benchmarks/small_sets.py --data-dir DIR --sets 2 --epochs 2                            tries it out
    python benchmarks/small_sets.py --data-dir DIR --go-on                  keeps the rows that the results hold already

The sets are cut from CIFAR-10 and the digits: 4 to 20 classes, 20 to 200 pictures each, of odd sizes, with 75 or 250
others of each class to validate on. All runs begin with random weights, at 32 pixels, so that a CPU can do it: one or
two minutes each on two free cores. What is compared is the top-1 at the end of a run. Rows are written as they come.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, print_table, table, write
from PIL import Image

SETS = [  # sources, classes, pictures of each
    ("digits", 4, 20), ("digits", 10, 30), ("digits", 10, 90), ("digits", 5, 60), ("cifar10", 4, 60),
    ("cifar10", 4, 200), ("cifar10", 10, 20), ("cifar10", 10, 50), ("both", 20, 20), ("both", 12, 40),
]  # fmt: skip
VALIDATED = {"digits": 75, "cifar10": 250}  # pictures of each class
SMALL = ["--image-size", "32", "--workers", "0", "--checkpoint-every", "0", "--eval-every", "1000", "--law", "off"]
DEFAULTS = {
    "folder": ["folder"],
    "photos": ["photos", "--model", "resnet18", "--init", "none"],
}
SWEEP = {
    f"{optimizer} {lr:g}": ["folder", "--optimizer", optimizer, "--lr", str(lr)]
    for optimizer, rates in {"sgd": (0.01, 0.05), "adamw": (3e-4, 1e-3, 3e-3)}.items()
    for lr in rates
}


def pictures(data_dir: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By source its pictures, uint8 [n, h, w, 3], and their labels."""
    from lockstep.config import DataConfig
    from lockstep.data.sources import load
    from lockstep.distributed.world import World

    found = {}
    for name in ("digits", "cifar10"):
        images, _ = load(DataConfig(dataset=name), data_dir, 0, World.single())
        pixels, labels = images.read(np.arange(len(images)), None)
        stored = pixels.permute(0, 2, 3, 1).numpy()
        found[name] = np.broadcast_to(stored, (*stored.shape[:3], 3)), np.asarray(labels)
    return found


def make(folder: Path, sources: dict[str, Any], source: str, classes: int, count: int) -> None:
    """Write a set as train/CLASS/*.png and val/CLASS/*.png. What is in it follows from its name alone."""
    draw = np.random.default_rng([len(source), classes, count])
    names = [source] * classes if source != "both" else ["digits", "cifar10"] * (classes // 2)
    for number, name in enumerate(names):
        pixels, labels = sources[name]
        label = number if source != "both" else number // 2
        ids = draw.permutation(np.flatnonzero(labels == label))[: count + VALIDATED[name]]
        for place, sample in enumerate(ids):
            path = folder / ("val" if place < VALIDATED[name] else "train") / f"{name}-{label}" / f"{sample}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            width, height = map(int, draw.integers(24, 97, 2))
            Image.fromarray(pixels[sample]).resize((width, height), Image.Resampling.BILINEAR).save(path)


def top1(data: Path, flags: list[str]) -> float:
    """The top-1 at the end of a run, in per cent."""
    from lockstep.monitoring.journal import read

    with tempfile.TemporaryDirectory(prefix="lockstep-small-") as out:
        command = [sys.executable, "-m", "lockstep", "train", *flags, *SMALL, "--data-dir", str(data), "--out", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        last: Any = [record for record in read(Path(out, "journal.jsonl")) if record["kind"] == "eval"][-1]
        return 100 * float(last["top1"])


def main() -> None:
    """Make the sets, run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--sets", type=int, default=len(SETS))
    parser.add_argument("--epochs", type=int, default=0, help="of all runs (0: the recipes')")
    parser.add_argument("--go-on", action="store_true", help="keep the rows that are written already")
    args = parser.parse_args()
    sources, sides = pictures(Path(args.data_dir)), {**DEFAULTS, **SWEEP}
    longer = ["--epochs", str(args.epochs)] if args.epochs else []
    written = json.loads((RESULTS / "small_sets.json").read_text())["tables"][0]["rows"] if args.go_on else []
    rows = [row for row in written if None not in row]
    with tempfile.TemporaryDirectory(prefix="lockstep-sets-") as folder:
        for source, classes, count in SETS[: args.sets]:
            if f"{source}, {classes} x {count}" in {row[0] for row in rows}:
                continue
            data = Path(folder, f"{source}-{classes}-{count}")
            make(data, sources, source, classes, count)
            found = {name: top1(data, [*flags, *longer]) for name, flags in sides.items()}
            best = max(found[name] for name in SWEEP)
            rows.append([f"{source}, {classes} x {count}", *found.values(), found["folder"] - best])
            print(*rows[-1], flush=True)
            write("small_sets", {"tables": [result(list(sides), rows)]})
    print_table(result(list(sides), rows))


def result(sides: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    """The table of the sets that are done."""
    names = [f"{source}, {classes} x {count}" for source, classes, count in SETS]
    left = "; ".join(name for name in names if name not in {row[0] for row in rows})
    validated = ", ".join(f"{count} of each class of {source}" for source, count in VALIDATED.items())
    notes = [f"{validated} validate", *([f"not run yet: {left}"] if left else [])]
    return table("Top-1 of small sets from random weights, per cent", ["set", *sides, "folder - best"], rows, notes)


if __name__ == "__main__":
    main()
