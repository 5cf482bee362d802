"""Resizes at random moments: `python -m tests.resizes --count 500 --seconds 1800 --seed 1`.

One exact training is given one to four processes, again and again: while it starts, at steps, in evaluations, while it
writes a checkpoint; one time in ten a rank is killed instead, often in the midst of a resize. Then its epoch is
completed, and its digests are those of a run on one process that nobody disturbed; no process and no file is left.
Exit code 1: something is not so. Stalls are measured twice: by the `resize` records, and from step to step.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.journals import read
from tests.kills import digests
from tests.subprocesses import Command, lockstep

_TRAIN = (
    *("train", "digits", "--model", "mlp", "--device", "cpu", "--threads", "1", "--exact", "4", "--batch-size", "60"),
    *("--schedule", "constant", "--warmup-epochs", "0", "--ema", "0.99", "--log-every", "1", "--eval-every", "3"),
    *("--checkpoint-every", "40steps", "--max-restarts", "100000", "--override", "epochs"),
)
_PATIENCE_S, _KILLS = 240.0, 0.1


class Run:
    """The training, and what came of it so far."""

    def __init__(self, place: Path, draw: random.Random) -> None:
        self.place, self.folder, self.draw = place, place / "run", draw
        self.kills, self.faults, self.answers = 0, list[str](), list[float]()
        self.size = 2
        self.command: Command = lockstep(
            *_TRAIN, "--epochs", "1000000", "--nproc", "2", "--out", "run", cwd=place, env={"TMPDIR": str(place)}
        )

    def resize(self) -> None:
        """Ask for another number, and sometimes kill a rank meanwhile."""
        self.size = self.draw.choice([size for size in range(1, 5) if size != self.size])
        began = time.monotonic()
        asking = lockstep("resize", "run", "--nproc", str(self.size), cwd=self.place)
        if self.draw.random() < _KILLS:
            time.sleep(self.draw.uniform(0.0, 0.8))
            self.kill()
        ended = asking.end(_PATIENCE_S)
        self.answers.append(time.monotonic() - began)
        if ended.code != 0 or ended.orphans:
            self.faults.append(f"to {self.size}: {ended.text}")

    def kill(self) -> None:
        """Kill a rank; a run of one process that nobody has resized yet has none."""
        if workers := self.command.workers():
            try:
                self.command.signal(signal.SIGKILL, self.draw.choice(workers))
                self.kills += 1
            except (AssertionError, ProcessLookupError):  # it ended meanwhile
                return

    def complete(self) -> None:
        """End it, and train on to the end of its epoch; train as long undisturbed."""
        self.command.signal(signal.SIGTERM)
        ended = self.command.end(_PATIENCE_S)
        if ended.code != 143 or ended.orphans or "Traceback" in ended.err:
            self.faults.append(ended.text[-3000:])
        found = read(self.folder / "journal.jsonl")
        epochs = found[-1]["steps"] // found[0]["steps_per_epoch"] + 1
        for name in ("run", "straight"):
            again = lockstep(*_TRAIN, "--epochs", str(epochs), "--nproc", "1", "--out", name, cwd=self.place)
            ended = again.end(36000)
            if ended.code != 0:
                self.faults.append(f"{name}: {ended.text[-3000:]}")


def stalls(records: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Of each resize: seconds by its record, and from the last step before it until the first one after it was over."""
    said, measured = [], []
    for place, record in enumerate(records):
        if record["kind"] == "resize":
            said.append(record["seconds"])
            before = [r["time"] for r in records[max(0, place - 20) : place] if r["kind"] == "step"]
            after = [r["time"] for r in records[place : place + 20] if r["kind"] in ("step", "eval")]
            if before and after:
                measured.append(after[0] - before[-1])
    return said, measured


def shown(name: str, seconds: list[float]) -> str:
    """Median, 99th percentile and largest of some seconds."""
    if len(seconds) < 2:
        return f"{name}: too few"
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return f"{name}: p50 {statistics.median(seconds):.2f} s, p99 {p99:.2f} s, longest {max(seconds):.2f} s"


def trial(count: int, seconds: float, seed: int, place: Path) -> int:
    """So many resizes, or as many as the seconds allow; the exit code."""
    before, until = set(Path("/dev/shm").iterdir()), time.monotonic() + seconds
    run = Run(place, random.Random(seed))
    run.resize()
    memory = psutil.Process(run.command.pid).memory_info().rss / 2**20
    while len(run.answers) < count and time.monotonic() < until and len(run.faults) < 5:
        time.sleep(run.draw.uniform(0.0, 0.5))
        if run.draw.random() < _KILLS:
            run.kill()
        run.resize()
        if len(run.answers) % 50 == 0:
            print(f"{len(run.answers)} resizes, {run.kills} kills, {len(run.faults)} faults", flush=True)
    grown = psutil.Process(run.command.pid).memory_info().rss / 2**20 - memory
    run.complete()
    records = read(run.folder / "journal.jsonl")
    said, measured = stalls(records)
    mine, straight = digests(run.folder), digests(place / "straight")
    left = [*(set(Path("/dev/shm").glob("lockstep-resize-*")) - before), *place.glob("lockstep-resize-*")]
    left += [path for path in run.folder.iterdir() if path.name in ("resize.json", "run.lock")]
    print(f"{len(run.answers)} requests, {len(said)} resizes, {run.kills} kills, {records[-1]['steps']} steps")
    print(shown("stall by the records", said))
    print(shown("from step to step", measured))
    print(shown("from the command to its answer", run.answers))
    print(f"the launcher's memory grew by {grown:.0f} MiB; {len(left)} files left over {left}")
    print("one digest" if mine == straight else f"two digests: {mine} and {straight}", *run.faults, sep="\n")
    return int(mine != straight or bool(left or run.faults))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="resizes-") as name:
        return trial(asked.count, asked.seconds, asked.seed, Path(name))


if __name__ == "__main__":
    sys.exit(main())
