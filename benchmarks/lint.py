"""How long `lockstep lint` takes for a folder of many files: `python benchmarks/lint.py [--files 1000] [--runs 3]`.

The files are copies of the scripts of tests/lint/corpus and examples/, in folders of their own so that no name means
two files; each run is a process of its own, as a user starts it, and the fastest of them is printed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

ROOT = Path(__file__).parents[1]


def programs() -> list[list[Path]]:
    """The programs to copy: single files, and folders whose files import each other."""
    found = []
    for folder in (ROOT / "tests/lint/corpus/right", ROOT / "tests/lint/corpus/wrong"):
        for path in sorted(folder.iterdir()):
            files = sorted(path.glob("*.py")) if path.is_dir() else [path] * (path.suffix == ".py")
            found += [files] if files else []
    return found + [[path] for path in sorted((ROOT / "examples").rglob("*.py"))]


def build(folder: Path, count: int) -> int:
    """Copy programs into a folder until it has at least so many files; how many there are."""
    made = 0
    for number, files in enumerate(islice(cycle(programs()), count)):
        if made >= count:
            break
        place = folder / f"program{number:05d}"
        place.mkdir()
        for file in files:
            (place / file.name).write_bytes(file.read_bytes())
            made += 1
    return made


def main() -> None:
    """Print files, lines, and the fastest run's seconds, wall and CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = build(folder, args.files)
        lines = sum(path.read_text(encoding="utf-8").count("\n") for path in folder.rglob("*.py"))
        taken = []
        for _ in range(args.runs):
            before, start = os.times(), time.perf_counter()
            ended = subprocess.run(
                [sys.executable, "-m", "lockstep", "lint", name, "--format", "github"], stdout=subprocess.DEVNULL
            )
            after = os.times()
            if ended.returncode not in (0, 1):
                raise SystemExit(f"lockstep lint ended with {ended.returncode}")
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            taken.append((time.perf_counter() - start, cpu))
        wall, cpu = min(taken)
        print(f"{made} files, {lines} lines: {wall:.1f} s, {cpu:.1f} s of CPU, {1000 * wall / made:.1f} ms a file")


if __name__ == "__main__":
    main()
