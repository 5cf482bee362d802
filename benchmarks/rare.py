"""Rare classes: macro F1 of CIFAR-10 with 5,000 to 100 images a class, plain, by --balance and by --class-weights.

    python benchmarks/rare.py --data-dir DIR --seeds 5 --epochs 10
    python benchmarks/rare.py --data-dir DIR --seeds 2 --epochs 1 --tiny      tries it out on 1/20 of the images

Class k keeps 5000 * 50^(-k / 9) images (the long-tailed CIFAR of Cui et al., CVPR 2019, at 1:50); the test set is
whole. Sides take turns with the same seeds, so that they share initial weights and differ in one setting. Intervals are
bootstrap ones of the median over seeds; differences are paired by seed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, interval, print_table, table, write

SIDES: dict[str, list[str]] = {
    "plain": [],
    "--balance sqrt": ["--balance", "sqrt"],
    "--balance equal": ["--balance", "equal"],
    "--class-weights auto": ["--class-weights", "auto"],
    "--class-weights effective:0.999": ["--class-weights", "effective:0.999"],
    "--loss focal:2": ["--loss", "focal:2"],
}
RATIO, FULL = 50, 5000
KEPT = "LOCKSTEP_RARE_PART"  # of the images, for a trial


def long_tailed(data_dir: Path) -> Any:
    """The data set that runs name as rare:long_tailed."""
    from lockstep.data.official import OFFICIAL, load_official
    from lockstep.distributed.world import World

    train, val = load_official(OFFICIAL["cifar10"], data_dir, World.single())
    part = float(os.environ.get(KEPT, "1"))
    counts = [max(2, round(part * FULL * RATIO ** (-label / 9))) for label in range(10)]
    ids = np.concatenate([np.flatnonzero(train.labels == label)[:count] for label, count in enumerate(counts)])
    some = np.arange(round(part * len(val)))
    return train.read(np.sort(ids)), val.read(some)


def run(seed: int, epochs: int, flags: list[str], tiny: bool) -> dict[str, float]:
    """One run in a process of its own; its last evaluation."""
    from lockstep.monitoring.journal import read

    here = Path(__file__).parent
    environ = os.environ | {KEPT: "0.05" if tiny else "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="lockstep-rare-") as folder:
        command = ["-m", "lockstep", "train", "cifar10", "--dataset", "rare:long_tailed", "--seed", str(seed)]
        command += ["--epochs", str(epochs), "--eval-every", str(epochs), "--checkpoint-every", "0", "--law", "off"]
        subprocess.run([sys.executable, *command, *flags, "--out", folder], check=True, env=environ)
        last: Any = [record for record in read(Path(folder, "journal.jsonl")) if record["kind"] == "eval"][-1]
    return {name: last[name] for name in ("macro_f1", "macro_recall", "top1")}


def tables(runs: dict[str, list[dict[str, float]]], epochs: int, flags: list[str]) -> list[dict[str, Any]]:
    """Each side's scores, and by how much its macro F1 is beyond plain's."""
    rows = []
    for name, mine in runs.items():
        scores = [each["macro_f1"] for each in mine]
        gains = [each["macro_f1"] - base["macro_f1"] for each, base in zip(mine, runs["plain"], strict=False)]
        row = [name, _shown(scores), _shown(gains) if name != "plain" else None]
        rows.append(
            [*row, *(f"{statistics.median(each[key] for each in mine):.1%}" for key in ("macro_recall", "top1"))]
        )
    seeds = min(map(len, runs.values()))
    notes = [f"Medians over {seeds} seed(s) of {epochs} epoch(s); the test set has 1,000 images of each class."]
    if flags:
        notes.append(f"Instead of the recipe's own settings: {' '.join(flags)}.")
    columns = ["", "macro F1", "over plain, paired", "balanced accuracy", "top-1"]
    return [table("CIFAR-10 with 5,000 to 100 images a class", columns, rows, notes)]


def _shown(values: list[float]) -> str:
    low, high = interval(values)
    return f"{100 * statistics.median(values):.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sides", default="", help="some of them, as plain,--balance equal (default: all)")
    parser.add_argument("--tiny", action="store_true", help="a twentieth of the images and a small net; writes nothing")
    parser.add_argument("--go-on", action="store_true", help="after the seeds that results/rare.json has already")
    parser.add_argument("flags", nargs="*", help="further flags of lockstep train, after --")
    args = parser.parse_args()
    flags = [*args.flags, *(["--data-dir", args.data_dir] if args.data_dir else [])]
    flags += ["--model", "digits_net", "--lr", "0.02", "--no-channels-last"] if args.tiny else []
    names = args.sides.split(",") if args.sides else [*SIDES]
    asked = {"flags": args.flags, "epochs": args.epochs, "sides": list(dict.fromkeys(["plain", *names]))}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in asked["sides"]}
    if args.go_on and not args.tiny:
        kept = json.loads((RESULTS / "rare.json").read_text())
        if any(kept[key] != value for key, value in asked.items()):
            parser.error(f"{RESULTS / 'rare.json'} is of other settings")
        runs = kept["runs"]
    for seed in range(len(runs["plain"]), args.seeds):
        for name, found in runs.items():
            found.append(run(seed, args.epochs, [*SIDES[name], *flags], args.tiny))
        if not args.tiny:
            write("rare", {**asked, "runs": runs, "tables": tables(runs, args.epochs, args.flags)})
    print_table(tables(runs, args.epochs, args.flags)[0])


if __name__ == "__main__":
    main()
