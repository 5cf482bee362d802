"""`lockstep chaos`: kill a training at random moments, let it recover, and compare it with an undisturbed one."""

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.flags import as_flags
from lockstep.watch.journal import Record, read

_PATIENCE_S = 120.0  # for a start, a step or a recovery: beyond it the run counts as lost
_POLL_S = 0.002


@dataclass(frozen=True)
class Plan:
    """What to break, and how often."""

    kills: int = 20
    """Faults to inject."""
    chaos_seed: int = 0
    """Seed of the moments and the victims."""
    config: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        if self.kills < 1:
            raise UserError(f"--kills {self.kills} breaks nothing", "Use 1 or more.")
        if self.config.execution.nnodes > 1:
            raise UserError("chaos with --nnodes", "It kills processes of this machine alone: leave the flag out.")
        if self.config.recovery.checkpoint_every in ("0", "never"):
            raise UserError("chaos without checkpoints", "Nothing could be recovered: leave --checkpoint-every 0 out.")


@dataclass(frozen=True)
class Fault:
    """One injected fault and what became of it. Times in seconds from the kill, on one clock."""

    what: str  # "rank 1 of 3" or "launcher of 3"
    moment: str
    detected_s: float  # all processes of that attempt gone, or the launcher's word
    started_s: float  # the new attempt has imported torch and assembled the run
    recovered_s: float  # it has taken a step that counts
    repeated: int  # steps taken again
    processes: int  # of the new attempt


@dataclass
class Report:
    """All faults, and the digests of all runs."""

    faults: list[Fault] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    ledgers: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    runs: int = 0
    exact: bool = False

    @property
    def holds(self) -> bool:
        """True where every run came back with the same ledger and, in exact mode, the same weights."""
        return not self.lost and len(self.ledgers) == 1 and (not self.exact or len(self.weights) == 1)


def chaos(plan: Plan, say: Callable[[str], None]) -> Report:
    """Run the plan; the undisturbed run comes first."""
    draw = random.Random(plan.chaos_seed)
    report = Report(exact=bool(plan.config.shards))
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as folder:
        base = _prepared(plan.config)
        calm = Attempt(base, Path(folder, "calm"), say)
        calm.finish()
        _compare(report, calm.folder)
        say(f"undisturbed: {calm.journal()[-1]['steps']} steps, ledger {next(iter(report.ledgers))[:12]}")
        while len(report.faults) + len(report.lost) < plan.kills:
            _disturbed_run(plan, base, Path(folder, f"run-{report.runs}"), draw, report, say)
            report.runs += 1
    return report


def _prepared(config: Config) -> Config:
    """The config with what chaos needs: every step in the journal, restarts without end, its own folders."""
    from lockstep.launcher import processes

    count = processes(config.execution)
    execution = replace(config.execution, nproc=count, log_every=1, out="")
    return replace(config, execution=execution, recovery=replace(config.recovery, max_restarts=10_000))


def _disturbed_run(
    plan: Plan, base: Config, folder: Path, draw: random.Random, report: Report, say: Callable[[str], None]
) -> None:
    most = int(base.execution.nproc)
    attempt = Attempt(base, folder, say)
    try:
        while len(report.faults) < plan.kills:
            if not attempt.wait_for_step():
                break  # it is complete
            struck = _strike(attempt, base, folder, draw, most, say)
            if struck is None:
                break
            fault, attempt = struck
            report.faults.append(fault)
            number = f"{len(report.faults)}/{plan.kills}"
            say(f"{number}: {fault.what} killed {fault.moment}; back after {fault.recovered_s:.1f} s")
        attempt.finish()
        _compare(report, folder)
    except Lost as lost:
        report.lost.append(f"{folder.name}: {lost}")
    finally:
        attempt.kill_all()
        shutil.rmtree(folder, ignore_errors=True)


def _compare(report: Report, folder: Path) -> None:
    end = read(folder / "journal.jsonl")[-1]
    if end["kind"] != "end" or end["status"] != "completed":
        raise Lost(f"the run did not complete: {end}")
    report.ledgers.add(end["ledger_sha256"])
    report.weights.add(end["weights_sha256"])


def _strike(
    attempt: "Attempt", base: Config, folder: Path, draw: random.Random, most: int, say: Callable[[str], None]
) -> tuple[Fault, "Attempt"] | None:
    """Kill one process at a random moment and wait for the recovery; None where the run was complete before."""
    while_writing = draw.random() < 0.4
    if not attempt.wait_for_moment(draw, while_writing):
        return None
    records = attempt.journal()
    pids = attempt.pids()
    victim = draw.randrange(-1, len(pids)) if len(pids) > 1 else -1
    steps = max((r["step"] for r in records if r["kind"] == "step"), default=0)
    runs = sum(r["kind"] == "run" for r in records)
    writing = attempt.writing()
    moment = "while a checkpoint was written" if writing else f"at step {steps}"
    began = time.monotonic()
    os.kill(attempt.process.pid if victim < 0 else pids[victim], signal.SIGKILL)
    if victim < 0:
        attempt.process.wait()
        attempt.wait_until_gone(pids)
        detected = time.monotonic() - began
        count = draw.randint(1, most)
        attempt = Attempt(replace(base, execution=replace(base.execution, nproc=count)), folder, say)
    else:
        attempt.wait_until_gone(pids)
        detected = time.monotonic() - began
    started = attempt.wait_for(lambda new: sum(r["kind"] == "run" for r in new) > runs, "a new start") - began
    run = [r for r in attempt.journal() if r["kind"] == "run"][-1]
    recovered = attempt.wait_for(lambda new: _stepped(new, runs + 1), "a step") - began
    what = f"{'launcher' if victim < 0 else f'rank {victim}'} of {len(pids)}"
    repeated = max(0, steps - run["resumed_from"])
    return Fault(what, moment, detected, started, recovered, repeated, len(run["pids"])), attempt


def _stepped(records: list[Record], runs: int) -> bool:
    """True where attempt number `runs` has taken a step, or ended."""
    seen = 0
    for record in records:
        seen += record["kind"] == "run"
        if seen >= runs and record["kind"] in ("step", "end"):
            return True
    return False


class Lost(Exception):
    """A run did not come back."""


class Attempt:
    """One call of the command, and its run folder."""

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        out = replace(config, execution=replace(config.execution, out=str(folder)))
        command = [sys.executable, "-m", "lockstep", "train", config.recipe, *as_flags(out)]
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill_all)
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self._read: tuple[int, list[Record]] = (0, [])

    def journal(self) -> list[Record]:
        """The records so far; read again only where the file has grown."""
        path = self.folder / "journal.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._read[0]:
            self._read = size, read(path)
        return self._read[1]

    def pids(self) -> list[int]:
        """The processes of the newest attempt, by rank."""
        runs = [r for r in self.journal() if r["kind"] == "run"]
        return list(runs[-1]["pids"]) if runs else []

    def writing(self) -> bool:
        """True while a checkpoint is being written."""
        return any((self.folder / "checkpoints").glob(".writing-*"))

    def wait_for(self, true_of: Callable[[list[Record]], bool], what: str) -> float:
        """Wait until something is true of the journal; returns the moment."""
        for _ in self._polls(what):
            if true_of(self.journal()):
                return time.monotonic()
            if self.process.poll() is not None and not true_of(self.journal()):
                raise Lost(f"the command ended ({self.process.returncode}) before {what}: {self._said()}")
        raise AssertionError("unreachable")

    def wait_for_step(self) -> bool:
        """Wait until the newest attempt has taken a step; False where the run is complete instead."""
        runs = max(1, sum(r["kind"] == "run" for r in self.journal()))
        self.wait_for(lambda new: _stepped(new, runs), "a step")
        return bool(self.journal()[-1]["kind"] != "end")

    def wait_for_moment(self, draw: random.Random, while_writing: bool) -> bool:
        """Wait for a random moment, or for a checkpoint being written; False where the run ended meanwhile."""
        until = time.monotonic() + draw.uniform(0.0, 1.5)
        for _ in self._polls("its end"):
            if self.process.poll() is not None or self.journal()[-1]["kind"] == "end":
                return False
            if self.writing() if while_writing else time.monotonic() >= until:
                return True
        return False

    def wait_until_gone(self, pids: list[int]) -> None:
        """Wait until none of the processes runs any more."""
        for _ in self._polls("all processes were gone"):
            if not any(_alive(pid) for pid in pids):
                return

    def finish(self) -> None:
        """Wait for the end of the run."""
        for _ in self._polls("the end"):
            if self.process.poll() is not None:
                break
        if self.process.returncode != 0:
            raise Lost(f"exit code {self.process.returncode}: {self._said()}")

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for pid in self.pids() if self.process.poll() is None else []:
            if _alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.output.close()

    def _polls(self, what: str) -> Iterator[None]:
        deadline, steps = time.monotonic() + _PATIENCE_S, -1
        while time.monotonic() < deadline:
            yield
            if (now := len(self.journal())) != steps:  # it moves: patience starts anew
                deadline, steps = time.monotonic() + _PATIENCE_S, now
            time.sleep(_POLL_S)
        raise Lost(f"no progress in {_PATIENCE_S:.0f} s, waiting for {what}: {self._said()}")

    def _said(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-2000:]


def _alive(pid: int) -> bool:
    """True for a process that runs; a zombie is only an entry that its parent has not yet read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def show(report: Report) -> None:
    """Print the table and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("fault", "moment", "gone s", "started s", "recovered s", "steps repeated", "goes on with")
    for f in report.faults:
        numbers = [f"{x:.2f}" for x in (f.detected_s, f.started_s, f.recovered_s)]
        table.add_row(f"{f.what} killed", f.moment, *numbers, str(f.repeated), f"{f.processes} process(es)")
    console.print(table)
    if report.faults:
        middle: dict[str, Any] = {
            "gone": statistics.median(f.detected_s for f in report.faults),
            "importing and assembling": statistics.median(f.started_s - f.detected_s for f in report.faults),
            "first step": statistics.median(f.recovered_s - f.started_s for f in report.faults),
            "in all": statistics.median(f.recovered_s for f in report.faults),
        }
        console.print("median seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in middle.items()))
    total = len(report.faults) + len(report.lost)
    console.print(
        f"{len(report.faults)} of {total} faults recovered in {report.runs} run(s); "
        f"{len(report.ledgers)} ledger digest(s), {len(report.weights)} weights digest(s)"
        + ("" if report.exact else " (only exact mode, --shards, promises one)")
    )
    for text in (*report.lost, *sorted(report.ledgers), *(sorted(report.weights) if report.exact else ())):
        console.print(text, soft_wrap=True)
