"""This tree beside another commit of it: step, whole loop, throughput, exact mode, checkpoints and the start.

    python benchmarks/against.py 2e31084                         about 12 minutes on two quiet cores
    python benchmarks/against.py 2e31084 --only start --rounds 5

The commit is checked out beside this tree for as long as it takes. Each measurement runs once a round in either tree,
every other round in the other order, as a process of its own with that tree's own code: a figure is read off each, and
the ratio is the median of the rounds' ratios. Both trees are compiled to bytecode first, as pip leaves them: without it
each start compiles anew, and the larger tree for longer. Data are made up, so nothing is downloaded. Writes
results/against.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import print_table, ratio, show, table, write

from lockstep.commands.measuring import watch_others
from lockstep.distributed.signals import sigterm_raises

TREE = Path(__file__).parents[1]
PARTS = ("overhead", "throughput", "exact", "checkpoint", "start")
_SIDE = Path(__file__).parent / "against_side.py"


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A temporary work tree of a commit."""
    with tempfile.TemporaryDirectory(prefix="lockstep-against-") as folder:
        place = Path(folder) / "tree"
        git = ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def side(tree: Path, part: str) -> dict[str, float]:
    """One measurement of one tree: figures by name, all of them better where they are smaller."""
    paths = os.pathsep.join([str(tree / "src"), str(tree / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": paths}
    # -P: not this tree's modules, which stand beside the program
    with tempfile.TemporaryDirectory(prefix="lockstep-against-") as folder:
        command = [sys.executable, "-P", str(_SIDE), part, folder]
        ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{part} in {tree}:\n{ended.stderr[-3000:]}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def measure(trees: dict[str, Path], parts: list[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """The figures of each tree, a dictionary a round; parts and trees take turns."""
    found: dict[str, list[dict[str, float]]] = {name: [{} for _ in range(rounds)] for name in trees}
    for number in range(rounds):
        for part in parts:
            for name in list(trees) if number % 2 == 0 else list(trees)[::-1]:
                print(f"round {number + 1} of {rounds}: {part}, {name}", file=sys.stderr, flush=True)
                found[name][number] |= side(trees[name], part)
    return found


def tables(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The result as a table."""
    before, now = result["figures"][result["commit"]], result["figures"]["now"]
    rows = []
    for name in now[0]:
        old, new = ([figures[name] for figures in each] for each in (before, now))
        rows.append([name, statistics.median(old), statistics.median(new), show(ratio(new, old))])
    busy = result["others_cores"]
    notes = [
        f"{len(now)} interleaved rounds; medians, and the median of the rounds' ratios with its 95 % bootstrap "
        "interval. All figures are better where they are smaller.",
        f"Others kept {busy:.2f} cores busy meanwhile" + (": take it again on a quiet machine." if busy > 0.2 else "."),
    ]
    return [table(f"This tree beside {result['commit']}", ["", "before", "now", "now / before"], rows, notes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--only", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    parts = args.only.split(",")
    others = watch_others()
    with sigterm_raises(), checked_out(args.commit) as place:
        trees = {args.commit: place, "now": TREE}
        for tree in trees.values():
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree / "src")], check=True)
        figures = measure(trees, parts, args.rounds)
    result: dict[str, Any] = {"commit": args.commit, "figures": figures, "others_cores": others()}
    result["tables"] = tables(result)
    print_table(result["tables"][0])
    write("against", result)


if __name__ == "__main__":
    main()
