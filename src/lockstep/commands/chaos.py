"""`lockstep chaos`: kill a training at random moments, let it recover, and compare it with an undisturbed one."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.commands.shared.arguments import planned, print_error, start_training
from lockstep.config import Config
from lockstep.distributed.files import temporary_folder
from lockstep.distributed.proc import alive
from lockstep.errors import EXIT_FAILURE, UserError
from lockstep.monitoring.journal import Record, RunRecord, end_of, read

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
        if self.config.recovery.checkpoint_interval.count == 0:
            raise UserError("chaos without checkpoints", "Nothing could be recovered: leave --checkpoint-every 0 out.")


@dataclass(frozen=True)
class Fault:
    """One injected fault and what became of it."""

    victim: str  # "rank 1 of 3" or "launcher of 3"
    moment: str
    recovered_s: float  # from the kill to the first step of the new attempt
    repeated: int  # steps taken again
    processes: int  # of the new attempt


@dataclass
class Report:
    """All faults, and the digests of all runs."""

    exact: bool
    faults: list[Fault] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    ledgers: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    runs: int = 0

    @property
    def holds(self) -> bool:
        """True where every run came back with the same ledger and, in exact mode, the same weights."""
        return not self.lost and len(self.ledgers) == 1 and (not self.exact or len(self.weights) == 1)

    def add(self, run: "Run") -> int:
        """Wait for a run's end and add its digests; returns its steps."""
        run.until(lambda: run.process.poll() is not None, "its end")
        end = end_of(run.journal())
        if run.process.returncode or end is None or end["status"] != "completed":
            raise run.lost(f"exit code {run.process.returncode}")
        self.ledgers.add(end["ledger_sha256"])
        self.weights.add(end["weights_sha256"])
        return end["steps"]


class Lost(UserError):
    """A run did not come back."""


class Run:
    """`lockstep train` in a process of its own, watched through its journal."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder, self.output = config.with_execution(out=str(folder)), folder, Path(f"{folder}.txt")
        self.process = start_training(self.config, self.output)
        self._read: tuple[int, list[Record]] = (0, [])

    def journal(self) -> list[Record]:
        """The records so far; read again only where the file has grown."""
        path = self.folder / "journal.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._read[0]:
            self._read = size, read(path)
        return self._read[1]

    def attempts(self) -> list[RunRecord]:
        """The records that attempts begin with."""
        return [record for record in self.journal() if record["kind"] == "run"]

    def stepped(self, attempt: int) -> bool:
        """True where attempt number `attempt`, from 1, or a later one has taken a step or ended."""
        records, begun = self.journal(), self.attempts()
        return len(begun) >= attempt and any(
            record["kind"] in ("step", "end") for record in records[records.index(begun[attempt - 1]) :]
        )

    def writing(self) -> bool:
        """True while a checkpoint is being written."""
        return any((self.folder / "checkpoints").glob(".writing-*"))

    def until(self, holds: Callable[[], bool], what: str) -> float:
        """Wait until something holds; returns the moment. Raises Lost where nothing moves or the command ended."""
        deadline, count = 0.0, -1
        while True:
            code, records = self.process.poll(), self.journal()
            if holds():
                return time.monotonic()
            if code not in (None, -signal.SIGKILL):  # a killed one's processes may still be there
                raise self.lost(f"the command ended ({code}) before {what}")
            if len(records) != count:  # it moves: patience starts again
                deadline, count = time.monotonic() + _PATIENCE_S, len(records)
            if time.monotonic() > deadline:
                raise self.lost(f"no progress in {_PATIENCE_S:.0f} s, waiting for {what}")
            time.sleep(_POLL_S)

    def until_gone(self) -> float:
        """Wait until none of the newest attempt's processes runs any more."""
        pids = [pid for record in self.attempts()[-1:] for pid in record["pids"]]
        return self.until(lambda: not any(map(alive, pids)), "the end of its processes")

    def lost(self, why: str) -> Lost:
        """The error that this run is lost, with the end of its output."""
        return Lost(f"{self.folder.name}: {why}: {self.output.read_text(errors='replace')[-2000:]}")

    def close(self) -> None:
        """Kill it, wait for its processes, which end when it does, and delete its folder."""
        self.process.kill()
        self.process.wait()
        self.until_gone()
        shutil.rmtree(self.folder, ignore_errors=True)


def chaos(plan: Plan, log: Callable[[str], None]) -> Report:
    """Run the plan; the undisturbed run comes first. Raises Lost where that one fails."""
    from lockstep.distributed.devices import process_count

    draw, report = random.Random(plan.chaos_seed), Report(bool(plan.config.exact))
    most = process_count(plan.config.execution)
    base = replace(plan.config, recovery=replace(plan.config.recovery, max_restarts=10_000))
    base = base.with_execution(nproc=most, log_every=1)
    with temporary_folder("chaos-") as folder:
        with closing(Run(base, Path(folder, "undisturbed"))) as run:
            log(f"undisturbed: {report.add(run)} steps, ledger {next(iter(report.ledgers))[:12]}")
        while len(report.faults) + len(report.lost) < plan.kills:
            with closing(Run(base, Path(folder, f"run-{report.runs}"))) as run:
                try:
                    while len(report.faults) < plan.kills and (fault := _strike(run, draw, most)) is not None:
                        report.faults.append(fault)
                        done = f"{len(report.faults)}/{plan.kills}: {fault.victim} killed {fault.moment}"
                        log(f"{done}; back after {fault.recovered_s:.1f} s")
                    report.add(run)
                except Lost as lost:
                    report.lost.append(str(lost))
            report.runs += 1
    return report


def _strike(run: Run, draw: random.Random, most: int) -> Fault | None:
    """Kill one process at a random moment and wait for the recovery; None where the run is complete before."""
    attempt = max(1, len(run.attempts()))
    run.until(lambda: run.stepped(attempt), "a step")
    in_writing, moment = draw.random() < 0.4, time.monotonic() + draw.uniform(0.0, 1.5)
    due = run.writing if in_writing else lambda: time.monotonic() >= moment
    run.until(lambda: due() or end_of(run.journal()) is not None, "its end")
    if end_of(run.journal()):
        return None
    pids = run.attempts()[-1]["pids"]
    victim = draw.randrange(-1, len(pids)) if len(pids) > 1 else -1
    step = max((record["step"] for record in run.journal() if record["kind"] == "step"), default=0)
    where = "while a checkpoint was written" if run.writing() else f"at step {step}"
    began = time.monotonic()
    os.kill(run.process.pid if victim < 0 else pids[victim], signal.SIGKILL)
    if victim < 0:
        run.process.wait()
    run.until_gone()
    if victim < 0:
        run.process = start_training(run.config.with_execution(nproc=draw.randint(1, most)), run.output)
    recovered = run.until(lambda: run.stepped(attempt + 1), "a step") - began
    new = run.attempts()[-1]
    what = f"{'launcher' if victim < 0 else f'rank {victim}'} of {len(pids)}"
    return Fault(what, where, recovered, max(0, step - new["resumed_from"]), len(new["pids"]))


def main(args: list[str]) -> int:
    """Kill a training at random, and compare what comes back."""

    def often(config: Config) -> Plan:
        return Plan(config=replace(config, recovery=replace(config.recovery, checkpoint_every="10steps")))

    about = (
        "Train by the recipe `{}` while killing processes and the launcher at random moments, let it recover, and "
        "compare ledger and (with --exact) weights with an undisturbed run. Exit code 0: all came back the same."
    )
    plan: Plan = planned("chaos", often, args, about)
    show(report := chaos(plan, log=print_error))
    return 0 if report.holds else EXIT_FAILURE


def show(report: Report) -> None:
    """Print the table and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console, faults = Console(highlight=False), report.faults
    table = Table("fault", "moment", "back after s", "steps repeated", "goes on with")
    for f in faults:
        back, size = f"{f.recovered_s:.2f}", f"{f.processes} process(es)"
        table.add_row(f"{f.victim} killed", f.moment, back, str(f.repeated), size)
    console.print(table)
    console.print(
        f"{len(faults)} of {len(faults) + len(report.lost)} faults recovered in {report.runs} run(s); "
        f"{len(report.ledgers)} ledger digest(s), {len(report.weights)} weights digest(s)"
        + ("" if report.exact else " (only exact mode, --exact, promises one)")
    )
    for text in (*report.lost, *sorted(report.ledgers), *(sorted(report.weights) if report.exact else ())):
        console.print(text, markup=False, soft_wrap=True)
