"""Signals at random moments: `python -m tests.kills --kills 1000 --seconds 600 --seed 1`.

A small training on one to four processes is killed, told to end or stopped (SIGKILL, SIGTERM, SIGSTOP): a rank of it,
its launcher, or all at once; in its start, at steps, while a checkpoint is written, in evaluation. What is stopped goes
on after a while, or is a rank that --hang-timeout has to find. Each run is resumed until it is complete, each time on
another number of processes. Then its digests are those of an undisturbed run, no process is left, and no file beside
that run's. `--simultaneous 50` starts two runs at once in one folder, so many times. Exit code 1: something is not so.
"""

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import Recovery
from tests.journals import read
from tests.subprocesses import Command, Completed, lockstep

_TRAIN = (
    *("train", "digits", "--model", "mlp", "--device", "cpu", "--threads", "1", "--exact", "4", "--epochs", "8"),
    *("--batch-size", "60", "--log-every", "1", "--checkpoint-every", "10steps", "--hang-timeout", "5"),
    *("--max-restarts", "1000"),
)
_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
_MOMENTS = ("start", "steps", "checkpoint", "evaluation")
_PATIENCE_S, _POLL_S, _STOPPED_S = 240.0, 0.003, 0.5
_ENDS = {signal.SIGKILL: (-9,), signal.SIGTERM: (143, -15)}  # -15: before Python had a handler
# a signal's handler may raise between a file's opening and its use: Python closes it, with a warning that tests print
_UNCLOSED = re.compile(
    r"Exception ignored in: <_io\.[^\n]*\nTraceback [^\n]*\n(?: [^\n]*\n)*ResourceWarning: unclosed file"
)


@dataclass
class Tally:
    """What came of it."""

    runs: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    digests: set[tuple[str, str]] = field(default_factory=set)
    orphans: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)  # from a rank's kill to the next step that was taken
    faults: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True where all is as promised."""
        return len(self.digests) == 1 and not (self.orphans or self.left_over or self.faults)

    @property
    def signals(self) -> int:
        """How many were sent, SIGCONT not counted."""
        return sum(count for what, count in self.strikes.items() if what.startswith("SIG"))

    def fault(self, text: str) -> None:
        """Note one, and print it at once."""
        self.faults.append(text)
        print(text, flush=True)

    def show(self) -> None:
        print(f"{self.signals} signals in {self.runs} runs: {dict(sorted(self.strikes.items()))}")
        print(f"{len(self.digests)} digests, {len(self.orphans)} orphans, {len(self.left_over)} files left over")
        if times := sorted(self.recovered_s):
            median, last = statistics.median(times), times[-1]
            print(f"from a rank's kill to the next step: median {median:.2f} s of {len(times)}, longest {last:.2f} s")
        for text in (*self.orphans, *self.left_over):
            print(text)


class Run:
    """One training in a folder of its own, over several commands."""

    def __init__(self, folder: Path, draw: random.Random, tally: Tally) -> None:
        self.folder, self.draw, self.tally = folder, draw, tally
        self.command: Command
        self.size, self.ended, self.asked = 0, False, False

    def start(self) -> None:
        """The command, for a first time or again."""
        self.size, self.begun = self.draw.randint(1, 4), len(self.kinds("run"))
        argv = (*_TRAIN, "--nproc", str(self.size), "--out", self.folder.name)
        self.command = lockstep(*argv, cwd=self.folder.parent)
        self.ended = self.asked = False  # asked: a rank was told to end, so all will, sooner or later

    def journal(self) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        return read(path) if path.exists() else []

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.journal() if record["kind"] == kind]

    def stepped(self, begun: int) -> bool:
        """True where the attempt after so many has taken a step."""
        records = self.journal()
        starts = [place for place, record in enumerate(records) if record["kind"] == "run"]
        return len(starts) > begun and any(r["kind"] == "step" for r in records[starts[begun] :])

    def over(self) -> bool:
        """True where the command has ended."""
        return self.command.process.poll() is not None

    def until(self, holds: Any) -> bool:
        """Wait for a condition, or the command's end; False where neither came."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (self.over() or holds()):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def await_moment(self, moment: str) -> bool:
        """Wait until the moment has come, or the command's end; False where neither did."""
        if moment == "start":
            due = time.monotonic() + self.draw.uniform(0.0, 1.5)
            return self.until(lambda: time.monotonic() >= due)
        begun = len(self.kinds("run")) - 1 if len(self.kinds("run")) > self.begun else self.begun
        if not self.until(lambda: self.stepped(begun)):
            return False
        evaluated, due = len(self.kinds("eval")), time.monotonic() + self.draw.uniform(0.0, 0.4)
        if moment == "checkpoint":
            return self.until(lambda: any((self.folder / "checkpoints").glob(".writing-*")))
        if moment == "evaluation":
            return self.until(lambda: len(self.kinds("eval")) > evaluated)
        return self.until(lambda: time.monotonic() >= due)

    def strike(self) -> Completed | None:
        """One signal at a moment; how the command ended, None where it goes on."""
        moment, number = self.draw.choice(_MOMENTS), self.draw.choice(_SIGNALS)
        if not self.await_moment(moment):
            return self.lost(f"never came to {moment}")
        if self.over():
            return self.end("it ended by itself", (0, 143))  # 143: a rank was asked to end, and all agreed
        workers = self.command.workers()
        whom = self.draw.choice(("rank", "launcher", "all")) if workers else self.draw.choice(("launcher", "all"))
        pid = self.draw.choice(workers) if whom == "rank" else self.command.pid
        began, begun = time.monotonic(), len(self.kinds("run"))
        try:
            self.command.signal_group(number) if whom == "all" else self.command.signal(number, pid)
        except (AssertionError, ProcessLookupError):  # it ended meanwhile
            return None
        self.tally.strikes[f"{number.name} {whom}"] += 1
        self.tally.strikes[f"in {moment}"] += 1
        if number == signal.SIGSTOP:
            self.go_on(whom == "rank")
            return None
        if whom != "rank":
            asked = (143,) if self.asked else ()
            return self.end(f"{number.name} to {whom} in {moment}", (0, *asked, *_ENDS[number]))
        if number == signal.SIGTERM:  # all agree to stop; in the start it is restarted
            self.asked = True
            return None
        if not self.until(lambda: self.stepped(begun)):
            return self.lost(f"no step after {number.name} to a rank in {moment}")
        if not self.over() and moment != "start":
            self.tally.recovered_s.append(time.monotonic() - began)
        return None

    def go_on(self, may_stay: bool) -> None:
        """Let what is stopped go on, or leave it for --hang-timeout to find."""
        if may_stay and self.draw.random() < 0.3:
            self.tally.strikes["left stopped"] += 1
            return
        time.sleep(self.draw.uniform(0.0, _STOPPED_S))
        try:
            self.command.signal_group(signal.SIGCONT)
        except ProcessLookupError:
            return

    def lost(self, what: str) -> Completed:
        """A run that does not go on: note it, and end it."""
        family = self.command.family()
        ended, self.ended = self.command.end(timeout=0, grace=1), True
        self.tally.fault(f"{self.folder.name} on {self.size}: {what}; {family}\n{ended.text[-3000:]}")
        return ended

    def end(self, what: str, codes: tuple[int, ...]) -> Completed:
        """Await the command's end, and look at its code and what it leaves."""
        ended, self.ended = self.command.end(_PATIENCE_S, grace=5), True
        self.tally.orphans.extend(ended.orphans)
        if ended.code not in codes or "Traceback" in _UNCLOSED.sub("", ended.err):
            self.tally.fault(f"{self.folder.name} on {self.size}: {what}: {ended.text[-3000:]}")
        return ended

    def completed(self) -> bool:
        """True where the training has come to its end."""
        return any(record.get("status") == "completed" for record in self.journal())


def undisturbed(place: Path) -> tuple[tuple[str, str], set[str]]:
    """Digests and files of a run that nobody disturbs."""
    ended = lockstep(*_TRAIN, "--nproc", "1", "--out", "straight", cwd=place).end(_PATIENCE_S)
    assert ended.code == 0, ended.text
    return digests(place / "straight"), files(place / "straight")


def digests(folder: Path) -> tuple[str, str]:
    """Of the order of all samples, and of the final weights."""
    end = read(folder / "journal.jsonl")[-1]
    return end["ledger_sha256"], end["weights_sha256"]


def files(folder: Path) -> set[str]:
    """What is in a run folder; of checkpoints the last ones are kept, and the best one's where it is at its step."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    steps = [path.name for path in folder.glob("checkpoints/step-*")]
    for step in steps[: Recovery().keep + 1]:
        found = {name.replace(step, "one") for name in found}
    return found - {"hang-report.txt"}  # which stays for its reader


def kill(kills: int, seconds: float, seed: int, place: Path) -> Tally:
    """So many signals, or as many as the seconds allow; the run that is under way is completed."""
    draw, tally, until = random.Random(seed), Tally(), time.monotonic() + seconds
    wanted, known = undisturbed(place)
    tally.digests.add(wanted)
    before = set(Path(tempfile.gettempdir()).iterdir())  # torch makes itself a folder

    while tally.signals < kills and time.monotonic() < until:
        run = Run(place / f"run-{tally.runs}", draw, tally)
        tally.runs, mine = tally.runs + 1, tally.signals
        run.start()
        while not run.completed():
            calm = tally.signals - mine >= 12 or tally.signals >= kills or time.monotonic() > until
            ended = run.end("left alone", (0, 143, 124)) if calm or run.over() else run.strike()
            if ended is not None and not run.completed():
                if tally.faults and len(tally.faults) > 20:
                    return tally
                run.start()
        if not run.ended:
            run.end("completed", (0, 143))
        if run.command.process.returncode != 0:  # struck after its end: another start clears away what that left
            run.start()
            run.end("completed before", (0,))
        check(run.folder, known, before, tally)
        print(f"{tally.signals} signals, {tally.runs} runs, {len(tally.faults)} faults", flush=True)
    return tally


def check(folder: Path, known: set[str], before: set[Path], tally: Tally) -> None:
    """A complete run: its digests, and what is left in its folder and the one for temporary files."""
    tally.digests.add(digests(folder))
    extra = files(folder) ^ known
    tally.left_over.extend(f"{folder.name}/{name}" for name in sorted(extra))
    tally.left_over.extend(map(str, set(Path(tempfile.gettempdir()).iterdir()) - before))
    shutil.rmtree(folder)


def simultaneous(times: int, place: Path) -> int:
    """Start two runs at once in one folder, so often; returns how often one trained and the other said who has it."""
    told = re.compile(
        r"lockstep: \S+ is in use by another run: process \d+ on \S+, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n"
    )
    good = 0
    for index in range(times):
        argv = (*_TRAIN[:-2], "--epochs", "1", "--nproc", "2", "--out", f"shared-{index}")
        commands = [lockstep(*argv, cwd=place) for _ in range(2)]
        first, second = sorted((command.end(_PATIENCE_S) for command in commands), key=lambda ended: ended.code)
        well = (first.code, second.code, first.orphans, second.orphans) == (0, 2, (), ()) and told.match(second.err)
        good += bool(well)
        if not well:
            print(first.text, second.text, sep="\n")
        shutil.rmtree(place / f"shared-{index}")
    return good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simultaneous", type=int, default=0)
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        place, before = Path(name), tempfile.tempdir
        (place / "tmp").mkdir()
        os.environ["TMPDIR"] = str(place / "tmp")
        try:
            tempfile.tempdir = str(place / "tmp")  # of this process; TMPDIR is for those that it starts
            if asked.simultaneous:
                good = simultaneous(asked.simultaneous, place)
                print(f"{good} of {asked.simultaneous}: one trained, the other said who has the folder")
                return int(good < asked.simultaneous)
            tally = kill(asked.kills, asked.seconds, asked.seed, place)
        finally:
            tempfile.tempdir = before
    tally.show()
    return int(not tally.holds)


if __name__ == "__main__":
    sys.exit(main())
